"""Every door that README.md shows is opened here as it stands there."""

import re
import shlex
import subprocess
import sys
import tomllib

from nanovlm.cli.main import VERBS, Parser
from support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_block_says_what_the_sample_shows(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = blocks("python")
    exec(block, {})
    told, colour = capsys.readouterr().out.splitlines()
    assert told in README
    assert colour == "green"


def test_the_first_command_prints_the_output_below_it():
    out = subprocess.run([sys.executable, "generate.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert blocks("bash")[0].endswith("python generate.py\n") and blocks("text")[0] == out


def test_every_flag_shown_exists():
    lines = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines()]
    calls = [call for line in lines if (call := re.search(r"(generate|train)\.py ([^&]+)$", line.split("|")[-1]))]
    assert len(calls) > 5
    for call in calls:
        parser = Parser()
        VERBS["caption" if call[1] == "generate" else "train"].add_flags(parser)
        parser.parse_args(shlex.split(call[2]))
    installed = [shlex.split(line.split("|")[-1]) for line in lines if re.search(r"(^|\| )nanovlm ", line)]
    assert {words[1] for words in installed} >= {"caption", "chat", "export"}
    for words in installed + [shlex.split(verb.EXAMPLE) for verb in VERBS.values()]:
        parser = Parser()
        VERBS[words[1]].add_flags(parser)
        parser.parse_args(words[2:])


def test_the_second_command_is_what_ci_runs():
    (command,) = [block.strip() for block in blocks("bash") if "pytest" in block]
    assert command.replace("pip install", "pip install --quiet") in (ROOT / ".ci/run").read_text()


def test_the_wheel_holds_every_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {str(path.parent.relative_to(ROOT)).replace("/", ".") for name in ("models", "nanovlm") for path in (ROOT / name).rglob("__init__.py")}
    assert set(packages) == there
