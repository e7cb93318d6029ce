"""The command line without POSIX, which support/without_posix plays; names of files, and the registry, on Windows."""

import errno
import json
import mimetypes
import ntpath
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import pytest

from models.common import files
from models.common.errors import FileError
from nanovlm import outputs
from nanovlm.serving.options import ServeOptions
from nanovlm.serving.web import listen
from support import ROOT, noise_image

PROGRAM = """
import contextlib, json, signal, socket, sys, threading, time, urllib.request
from nanovlm.cli.main import main

def ask(port):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data, headers)
    answer = None
    while answer is None:
        time.sleep(0.1)
        with contextlib.suppress(ConnectionError, urllib.error.URLError):  # the port is not open yet
            answer = json.load(urllib.request.urlopen(request))
    print(answer["object"])
    signal.raise_signal(signal.SIGINT)

if __name__ == "__main__":  # workers import this program, too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for argv in json.loads(sys.argv[1]):
        if argv[0] == "serve":
            threading.Thread(target=ask, args=[port], daemon=True).start()
            argv += ["--port", port]
        print(argv[0], main(argv), flush=True)
"""
ONE = ["--model", "embedded", "--device", "cpu", "--dtype", "float32"]
CAPTION = ["caption", "photos", *ONE, "--max-new-tokens", "3", "--prefix", "\N{FIRE} "]
TABLE = [*CAPTION, "--out", "photos/metadata.jsonl"]
TRAIN = ["train", "--data", "photos", "--out", "out", "--batch-size", "2", "--save-every", "1"]
TRAIN += ["--validation", "0", "--max-steps"]


@pytest.fixture
def without_posix():
    """Environment of a process without fcntl, resource, fork, /proc and the rest, on a console of code page 1252."""
    folders = (ROOT / "tests/support/without_posix", ROOT)
    return os.environ | {
        "NANOVLM_WITHOUT_POSIX": "1", "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "cp1252", "PYTHONWARNDEFAULTENCODING": "1",
    }  # fmt: skip


def test_tables_name_images_with_slashes_and_those_of_another_drive_whole(monkeypatch):
    monkeypatch.setattr(outputs, "os", SimpleNamespace(path=ntpath))
    monkeypatch.setattr(outputs, "Path", PureWindowsPath)
    names = {r"C:\photos\sub\a.png": "sub/a.png", r"C:\a.png": "../a.png", r"D:\photos\a.png": "D:/photos/a.png"}
    for image, name in names.items():
        assert outputs.relative_name(image, r"C:\photos") == name
        assert ntpath.normpath(ntpath.join(r"C:\photos", name)) == image, "and the row is found again"


def test_a_folder_is_named_as_one_where_the_system_opens_none(tmp_path, monkeypatch):
    def refuse(path, flags, mode):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "open", refuse)
    for name, words in {".": "is a folder, not a file", "a": "a: Permission denied"}.items():
        with pytest.raises(FileError, match=words):
            files.read_bytes(tmp_path / name)


def test_pages_get_their_scripts_whatever_the_registry_says():
    mimetypes.add_type("text/plain", ".js")
    listen(ServeOptions(port=0)).close()
    assert mimetypes.guess_type("page.js") == ("text/javascript", None)


@pytest.mark.full
def test_every_verb_works_without_posix_and_resumes(tmp_path, monkeypatch, without_posix):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(["a.png", "sub/b.png"]):
        path = Path("photos", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(seed=i).save(path)
    Path("run.py").write_text(PROGRAM, encoding="utf-8")
    verbs = [
        CAPTION, CAPTION, [*CAPTION, "--overwrite"],  # texts beside images
        TABLE, TABLE, [*TABLE, "--overwrite"],
        ["caption", "photos/a.png", *ONE, "--choices", "\N{FIRE},\N{FIRE} \N{FIRE}"],
        [*TRAIN, "2"], [*TRAIN, "3"],
        ["evaluate", "--model", "out", "--data", "photos", "--report", "report.html"],
        ["export", "out", "--out", "exported"],
        ["serve", *ONE],
    ]  # fmt: skip
    command = [sys.executable, "run.py", json.dumps(verbs)]
    result = subprocess.run(command, env=without_posix, capture_output=True, timeout=400)
    errors = result.stderr.decode("cp1252")
    lines = result.stdout.decode("cp1252").splitlines()
    ends = [line for line in lines if line.partition(" ")[0] in {verb[0] for verb in verbs}]
    assert ends == [*7 * ["caption 0"], *2 * ["train 0"], "evaluate 0", "export 0", "serve 0"], errors
    assert "chat.completion" in lines
    assert any(line.startswith(r"\U0001f525") for line in lines), "an emoji on a console that has none"
    rows = list(map(json.loads, Path("photos/metadata.jsonl").read_bytes().decode().splitlines()))
    assert [row["file_name"] for row in rows] == ["a.png", "sub/b.png"]
    texts = [Path("photos", row["file_name"]).with_suffix(".txt").read_bytes().decode() for row in rows]
    assert texts == [f"{row['text']}\n" for row in rows] and b"\r" not in Path("photos/metadata.jsonl").read_bytes()
    assert errors.count("2 captioned") == 4 and errors.count("2 had captions") == 2
    assert "resumed out at step 2" in errors
    assert not list(tmp_path.rglob(".nanovlm-part-*")), "nothing is left half written"
