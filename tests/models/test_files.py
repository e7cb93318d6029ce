"""Files are read, replaced, appended to, locked and removed by one module, whatever somebody prepared beside them."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from models import files
from models.errors import FileError
from support import ROOT


@pytest.mark.parametrize(
    ("name", "words"),
    [("pipe", "is a pipe or a device, not a file"), (".", "is a folder, not a file"), ("missing", "No such file"),
     ("/dev/zero", "is a pipe or a device"), ("nul\0l", "null")],
)  # fmt: skip
def test_reading_takes_regular_files_only(tmp_path, name, words):
    os.mkfifo(tmp_path / "pipe")
    for read in (files.read_bytes, files.read_text, files.check_regular):
        with pytest.raises(FileError, match=words):
            read(tmp_path / name)


def test_a_limit_is_the_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert len(files.read_bytes(tmp_path / "a", 11)) == 11
    with pytest.raises(FileError, match="more than 10 bytes"):
        files.read_bytes(tmp_path / "a", 10)


def test_text_is_utf_8_with_or_without_a_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffgrün\r\n".encode())
    assert files.read_text(tmp_path / "a") == "grün\n"
    (tmp_path / "a").write_bytes(b"gr\xfcn")
    with pytest.raises(FileError, match="is not UTF-8 .*; save it as UTF-8"):
        files.read_text(tmp_path / "a")


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a.txt").symlink_to(victim)
    files.replace(tmp_path / "a.txt", "caption")
    assert (victim.read_text(), (tmp_path / "a.txt").read_text()) == ("mine", "caption")
    (tmp_path / "t.jsonl").symlink_to(victim)
    with pytest.raises(FileError) as error:
        files.append(tmp_path / "t.jsonl", b"{}\n")
    assert error.value.errno == errno.ELOOP and victim.read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sub").symlink_to(tmp_path / "other")
    with pytest.raises(FileError, match="sub is a link"), files.filling(tmp_path / "out") as new:
        (new / "sub").mkdir()
        (new / "sub/a").touch()
    assert not [*(tmp_path / "other").iterdir()]


def test_an_error_leaves_the_old_file_and_no_part(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "a") as new:
        new.write_text("half")
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), files.filling(tmp_path / "b") as new:
        (new / "half").touch()
        1 / 0  # noqa: B018
    assert (tmp_path / "a").read_text() == "old" and len([*tmp_path.iterdir()]) == 1


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    (tmp_path / "a").touch(mode=0o600)
    (tmp_path / "a").chmod(0o640)
    files.replace(tmp_path / "a", b"new")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_filled_and_its_other_files_stay(tmp_path):
    for content in ("one", "two"):
        with files.filling(tmp_path / "deep/out") as new:
            (new / "sub").mkdir()
            (new / "sub/a").write_text(content)
        (tmp_path / "deep/out/mine").touch()
    assert (tmp_path / "deep/out/sub/a").read_text() == "two"
    assert sorted(path.name for path in (tmp_path / "deep/out").iterdir()) == ["mine", "sub"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    (tmp_path / ".theirs.tmp").touch()
    (tmp_path / f"{files.PART}0").mkdir()
    (tmp_path / f"{files.PART}0/weights").touch()
    (tmp_path / f"{files.PART}1").touch()
    (tmp_path / f"{files.PART}2").symlink_to(tmp_path / ".theirs.tmp")
    with files.replacing(tmp_path / "a") as new, files.filling(tmp_path / "b") as folder:
        files.remove_parts(tmp_path)
        assert new.exists() and folder.exists()
        assert not list(tmp_path.glob(f"{files.PART}[01]"))
    assert (tmp_path / ".theirs.tmp").exists()


def test_on_a_drive_without_locks_nothing_is_removed_and_a_line_says_so(tmp_path, monkeypatch, caplog):
    def refuses(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuses)
    (tmp_path / f"{files.PART}0").touch()
    files.remove_parts(tmp_path)
    assert (tmp_path / f"{files.PART}0").exists() and not caplog.records
    with files.locked(tmp_path) as is_held:
        assert not is_held and "its drive has no locks" in caplog.text


def test_a_folder_that_cannot_be_opened_is_not_taken_for_locked(tmp_path, monkeypatch):
    def refuses(path, flags):
        raise FileError("Permission denied", errno.EACCES)

    monkeypatch.setattr(files, "_open", refuses)
    with pytest.raises(FileError, match="Permission denied"), files.locked(tmp_path):
        pass
    with files.locked(tmp_path, is_optional=True) as is_held:
        assert not is_held


def test_an_error_of_the_body_is_not_taken_for_that_of_the_lock(tmp_path):
    with pytest.raises(BlockingIOError), files.locked(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "of standard output")


def test_a_torn_write_is_cut_off_and_told(tmp_path):
    """RLIMIT_FSIZE stores a part of a write, as a full disk does."""
    program = (
        "import resource, signal; from models import files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "files.append('t', b'first\\n'); resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\n"
        "try: files.append('t', b'second\\n')\n"
        "except OSError as error: print(error.errno)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() in (str(errno.ENOSPC), str(errno.EFBIG)), run.stderr
    assert (tmp_path / "t").read_bytes() == b"first\n"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_two_processes_exclude_each_other_and_a_kill_frees_the_lock(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "a"
    path.touch()
    program = (  # its forked child lives on, as a data loader's worker does for a while
        "import os, sys, time; from models import files\n"
        "with files.locked(sys.argv[1]):\n"
        "    if os.fork(): print('held', flush=True)\n"
        "    time.sleep(5)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    other = subprocess.Popen([sys.executable, "-c", program, str(path)], env=env, stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "held\n"
    with pytest.raises(FileError, match="another run writes there; wait for its end"), files.locked(path):
        pass
    other.send_signal(signal.SIGKILL)
    other.wait()
    time.sleep(0.1)
    with files.locked(path), pytest.raises(FileError, match="another run"), files.locked(path):
        pass
    assert [*tmp_path.iterdir()] == ([path] if kind == "file" else [])


def test_the_lock_is_that_of_the_file_which_has_the_name(tmp_path):
    (tmp_path / "a").touch()
    with files.locked(tmp_path / "a"):
        files.replace(tmp_path / "a", b"new")
    with files.locked(tmp_path / "a"), pytest.raises(FileError), files.locked(tmp_path / "a"):
        pass
