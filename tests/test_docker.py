"""The Dockerfile and compose.yaml, without an engine: their steps run in a virtual environment."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import httpx
import pytest

from nanovlm.cli.main import Parser, import_verb
from support import ROOT

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the image is Linux")


def instructions():
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in joined if line.strip()]


def all_of(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def only(name):
    (rest,) = all_of(name)
    return rest


def environment():
    return dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))


def test_the_image_is_slim_its_user_has_no_privileges_and_only_what_is_copied_is_sent_to_the_engine():
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", only("FROM"))
    names = [name for name, _ in instructions()]
    assert only("USER") == "nanovlm" and names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert any("useradd" in run and "nanovlm" in run for run in all_of("RUN"))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {Path(word).name for rest in all_of("COPY") for word in rest.split()[:-1]}
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_compose_runs_what_the_image_runs():
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["server"]
    assert service["command"] == json.loads(only("CMD"))
    (port,) = service["ports"]
    assert port.endswith(f":{only('EXPOSE')}") and only("EXPOSE") in service["command"]
    (volume,) = service["volumes"]
    assert volume.partition(":")[2] == environment()["HF_HOME"]
    assert any(environment()["HF_HOME"] in run for run in all_of("RUN"))
    verb, *flags = service["command"]
    import_verb(verb).add_flags(parser := Parser())
    parser.parse_args(flags)


def in_folder(bin_folder, command, port):
    """A command of the image with its program of bin_folder and another port."""
    program, *flags = (word.replace(only("EXPOSE"), port) for word in command)
    return [str(Path(bin_folder) / program), *flags]


def run_server(bin_folder, port, cwd, **key):
    variables = {name: value for name, value in environment().items() if name.startswith("PYTHON")}
    variables |= {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ = {name: value for name, value in os.environ.items() if name not in ("NANOVLM_API_KEY", "PYTHONPATH")}
    command = in_folder(bin_folder, [*json.loads(only("ENTRYPOINT")), *json.loads(only("CMD"))], port)
    return subprocess.Popen(command, cwd=cwd, env=environ | variables | key, stderr=subprocess.PIPE, text=True)


def check_server(bin_folder, cwd):
    """The server starts with a key only, becomes healthy, asks clients for the key, and ends on SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    without_key = run_server(bin_folder, port, cwd)
    assert "NANOVLM_API_KEY" in without_key.communicate(timeout=60)[1] and without_key.returncode == 2
    check = in_folder(bin_folder, json.loads(only("HEALTHCHECK").partition("CMD ")[2]), port)
    assert subprocess.run(check, capture_output=True).returncode == 1
    server = run_server(bin_folder, port, cwd, NANOVLM_API_KEY="secret")
    try:
        while subprocess.run(check, capture_output=True).returncode:
            assert server.poll() is None, server.stderr.read()
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers).status_code == status
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.full
def test_the_server_and_its_health_check_run_as_in_the_image(tmp_path):
    (tmp_path / "nanovlm").write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from nanovlm.cli.main import main\nsys.exit(main())\n"
    )
    (tmp_path / "nanovlm").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    check_server(tmp_path, tmp_path)


@pytest.mark.slow  # installs the package
def test_every_step_runs_in_a_virtual_environment(tmp_path):
    """COPY and RUN in order; packages of this environment, such as torch, count as installed."""
    venv.create(tmp_path / "venv", with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (site / "this_environment.pth").write_text(sysconfig.get_path("purelib"))
    app, root, bin_folder = tmp_path / "app", tmp_path / "root", tmp_path / "venv/bin"
    app.mkdir()
    (root / "etc").mkdir(parents=True)
    for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid"):
        (root / "etc" / name).touch()
    variables = os.environ | environment() | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            command = ["cp", "-r", *(str(ROOT / source) for source in sources), str(app / target)]
            subprocess.run(command, check=True)
        elif name == "RUN" and (os.geteuid() == 0 or "useradd" not in rest):
            # this machine keeps its compiler
            rest = re.sub(r"apt-get [^&]*|rm -rf /var/lib/apt/lists/\*", "true ", rest)
            rest = rest.replace("useradd", f"useradd --prefix {root}").replace("/home/nanovlm", f"{root}/home/nanovlm")
            subprocess.run(["sh", "-e", "-c", rest], cwd=app, env=variables, check=True)
    (site / "nanovlm/__init__.py").resolve(strict=True)  # not the package of this environment
    check_server(bin_folder, tmp_path)
    if os.geteuid() == 0:
        cache = root / environment()["HF_HOME"].lstrip("/")
        assert cache.stat().st_uid == 10001 and "nanovlm:x:10001:" in (root / "etc/passwd").read_text()
