"""Limited processes: they run nothing of the current folder, know no key, end in time, and say why they ended."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from nanovlm.errors import CheckpointError, ImageError
from nanovlm.processing import limited_process
from nanovlm.processing.chat_template import ChatTemplate
from nanovlm.processing.limited_process import LimitedError, LimitedProcess
from nanovlm.processing.video import Video
from support import ROOT

NAMES = ("jinja2", "hashlib", "random", "json", "torch", "av", "PIL", "tempfile", "sitecustomize", "usercustomize")


def limited(function, seconds=1, n_bytes=2**29):
    return closing(LimitedProcess(f"limited_functions:{function}", seconds, n_bytes))


@pytest.fixture(autouse=True)
def functions_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def strange(in_tmp_path, tmp_path):
    """The current folder, with modules of common names; each leaves a file if it is executed."""
    for name in NAMES:
        Path(f"{name}.py").write_text(f"import sys; open('executed', 'a').write('{name} ' + sys.argv[0] + '\\n')\n")
    return tmp_path


def test_nothing_of_the_current_folder_is_executed(strange, monkeypatch):
    pytest.importorskip("av")
    for name, value in (("PYTHONPATH", "."), ("PYTHONSTARTUP", "json.py"), ("PYTHONHOME", ".")):
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(str(strange))
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "Hi"}], True) == "Hi"
    Path("a.mp4").write_text("no video")
    with pytest.raises(ImageError, match=r"^a\.mp4: not a video that can be read: Invalid data found"):
        Video.read("a.mp4")
    assert not Path("executed").exists()


def test_python_m_imports_nothing_of_a_folder_with_images(strange):
    run = subprocess.run([sys.executable, "-m", "nanovlm", "--version"], capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert run.stdout.startswith("nanovlm ") and not (strange / "executed").exists()


def test_a_process_knows_what_it_needs_and_no_key(monkeypatch):
    for name in ("NANOVLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "PYTHONINSPECT"):
        monkeypatch.setenv(name, "secret")
    with limited("surroundings") as process:
        found, _ = process.call()
    assert found["environment"].keys() <= {*limited_process.ENVIRONMENT, "LC_CTYPE"}, "Python may set LC_CTYPE"
    assert found["path"][0] == str(ROOT) and "" not in found["path"] and "torch" not in found["modules"]


ENDED = {
    "spin": "it took more than 1 s", "sleep": "it took more than 1 s", "fill": "it took more than 512 MiB",
    "kill": f"its process ended with signal {signal.SIGSEGV:d} (", "leave": "its process ended with exit status 3",
    "tear": "its process ended with exit status 0", "divide": "ZeroDivisionError: division by zero",
    "find": "No such file or directory", "nobody": "AttributeError: ",
}  # fmt: skip


@pytest.mark.parametrize("function", [pytest.param(f, marks=pytest.mark.full) if f == "spin" else f for f in ENDED])
def test_a_process_says_why_it_failed_and_answers_the_next_call(function, monkeypatch):
    if function == "sleep":
        monkeypatch.setattr(limited_process, "CLOCK_FACTOR", 0.5)
    with limited(function) as process:
        for _ in range(1 if function in ("spin", "sleep") else 2):
            with pytest.raises(LimitedError) as error:
                process.call()
            assert str(error.value).startswith(ENDED[function]) and "\n" not in str(error.value)
        process.function = "limited_functions:echo"
        if function in ("divide", "find", "nobody"):
            process.close()
        assert process.call({"a": ["\ud800", 1.5, None]}) == ({"a": ["\ud800", 1.5, None]}, b"12345")


def test_threads_get_their_own_answers():
    answers = {}
    with limited("echo", 5) as process:
        threads = [threading.Thread(target=lambda i=i: answers.update({i: process.call(i)})) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {i: (i, b"12345") for i in range(20)}


def test_an_interrupted_call_leaves_no_answer_for_the_next(monkeypatch):
    def interrupt(text):
        raise KeyboardInterrupt

    with limited("echo", 5) as process:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(limited_process.json, "loads", interrupt)
            process.call("first")
        assert process.call("second")[0] == "second"


@pytest.mark.full
def test_where_python_has_no_resource_the_clock_still_ends_a_template(monkeypatch):
    """Windows: memory is not limited there, which the module says."""
    monkeypatch.setattr(limited_process, "CLOCK_FACTOR", 0.7)
    blocked = "import sys; sys.modules['resource'] = None; "
    monkeypatch.setattr(limited_process, "PROGRAM", blocked + limited_process.PROGRAM)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"
    with pytest.raises(CheckpointError, match="^lm_chat_template cannot render this chat: it took more than 3 s$"):
        ChatTemplate(endless).render([{"role": "user", "content": "Hi"}], True)
