"""README.md and docs/ hold what they show: commands parse, Python blocks run, links and paths exist."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from random import Random

import pytest
import yaml

from nanovlm.cli.main import VERBS, Parser, import_verb, run_verb
from nanovlm.synthetic import draw, random_scene
from support import ROOT

README, ONNX = ROOT / "README.md", ROOT / "docs/onnx.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "nanovlm/assets/README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page) -> list[str]:
    """The last command of every line in the page's bash blocks, without comments."""
    lines = [line.split(" #")[0] for block in blocks(page, "bash") for line in block.splitlines()]
    return [re.split(r"\||&&", line)[-1].strip() for line in lines if line.strip()]


def verb_and_flags(command: str) -> tuple[str, list[str]] | None:
    if not re.search(r"\b(nanovlm|generate\.py|train\.py) ", command):  # a JSON body, perhaps, of several lines
        return None
    words = shlex.split(command)
    for script, verb in (("generate.py", "caption"), ("train.py", "train")):
        if at := [i for i, word in enumerate(words) if word.endswith(script)]:
            return verb, words[at[0] + 1 :]
    return (words[1], words[2:]) if words[:1] == ["nanovlm"] and not words[1].startswith("-") else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_parses(page):
    for command in commands(page):
        if found := verb_and_flags(command):
            import_verb(found[0]).add_flags(parser := Parser())
            parser.parse_args([flag for flag in found[1] if flag not in ("VERB", "--help")])


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_is_named_in_a_page(verb):
    import_verb(verb).add_flags(parser := Parser())
    flags = {action.option_strings[0] for action in parser._actions if action.option_strings} - {"-h"}
    named = {flag for page in PAGES for flag in re.findall(r"--[a-z-]+", page.read_text(encoding="utf-8"))}
    assert not flags - named


def test_the_readme_shows_every_verb_and_is_short():
    shown = {found[0] for command in commands(README) if (found := verb_and_flags(command))}
    assert shown == set(VERBS) and len(README.read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page != ONNX], ids=lambda page: page.name
)
def test_python_blocks_run(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "python"):
        exec(block, {})
    assert capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(("page", "out"), [("python.md", "out/smolvlm"), ("training.md", "out/small")])
def test_the_training_section_of_a_page_runs(tmp_path, monkeypatch, capsys, page, out):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for n in range(8):
        draw(random_scene(Random(n)), 96, 96).save(f"photos/{n}.png")
        Path(f"photos/{n}.txt").write_text("A photograph of my cat.")
    (block,) = [block for block in blocks(ROOT / "docs" / page, "py") if out in block]
    exec(block, {})
    assert "exact_match" in capsys.readouterr().out and Path(out, "config.json").exists()


@pytest.mark.full  # needs more than the extra test
def test_the_onnx_page_prints_the_readme_caption(onnx_folder, monkeypatch, capsys):
    pytest.importorskip("transformers"), pytest.importorskip("num2words")
    monkeypatch.chdir(onnx_folder.parents[1])
    if not Path("nanovlm").exists():
        Path("nanovlm").symlink_to(ROOT / "nanovlm")
    loop, openvino = blocks(ONNX, "python")
    capsys.readouterr()
    exec(loop, {})
    assert capsys.readouterr().out == blocks(README, "text")[0]
    pytest.importorskip("openvino")
    exec(openvino, {})
    assert capsys.readouterr().out == "(1, 3, 192)\n"


def test_the_readme_caption_is_what_the_first_command_prints(capsys):
    assert run_verb("caption", []) == 0
    assert blocks(README, "bash")[0].endswith("python generate.py\n")
    assert blocks(README, "text")[0] == capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_paths_and_module_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:models|nanovlm|eval|tests|docs)/[a-z0-9_/.]*)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"python -m (eval\.[a-z_]+)\b", text):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name


def test_both_commands_are_what_ci_runs_on_every_system():
    first, second = [block.strip() for block in blocks(README, "bash") if "pip install -e" in block and "&&" in block]
    assert second.replace("pip install", "pip install --quiet") in (ROOT / ".ci/run").read_text()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["readme"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [first, second]
    assert job["strategy"]["matrix"]["os"] == ["ubuntu-latest", "ubuntu-24.04-arm", "macos-latest", "windows-latest"]
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["everything"]["steps"]]


def test_the_wheel_holds_every_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inits = [path for name in ("models", "nanovlm") for path in (ROOT / name).rglob("__init__.py")]
    assert set(packages) == {".".join(path.parent.relative_to(ROOT).parts) for path in inits}


@pytest.mark.full
def test_the_attention_figure_is_drawn_by_its_script(tmp_path):
    pytest.importorskip("matplotlib")
    script, figure = ROOT / "docs/images/attention_squares.py", tmp_path / "squares.png"
    subprocess.run([sys.executable, script, figure], check=True)
    assert figure.read_bytes().startswith(b"\x89PNG")


MEASURED = {
    "speedup.json": '{"studies": [{"sizes": {"lengths": [2, 4]}, "rows": [{"design": "a", "total_ms": [1, 3]}]}]}',
    "metrics.jsonl": '{"step": 1, "loss": 2.0}\n{"step": 1, "validation_f1": 0.5}',
}


@pytest.mark.full
@pytest.mark.parametrize("name", MEASURED)
def test_what_a_command_measured_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / name).write_text(MEASURED[name])
    subprocess.run([sys.executable, ROOT / "docs/images/plots.py", tmp_path / name, tmp_path / "a.png"], check=True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
