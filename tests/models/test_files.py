"""Files are read, replaced, appended to, locked and removed by one module, whatever somebody prepared beside them."""

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial

import filelock
import pytest
import torch
from safetensors.torch import save_file

from models.common import files
from models.common.errors import FileError
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


def test_a_limit_is_the_limit_and_text_is_utf_8_with_or_without_a_byte_order_mark(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 11)
    assert len(files.read_bytes(path, 11)) == 11
    with pytest.raises(FileError, match="more than 10 bytes"):
        files.read_bytes(path, 10)
    path.write_bytes("\ufeffgrün\r\n".encode())
    assert files.read_text(path) == "grün\n"
    path.write_bytes(b"gr\xfcn")
    with pytest.raises(FileError, match="is not UTF-8 .*; save it as UTF-8"):
        files.read_text(path)


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


def test_a_file_is_replaced_and_a_folder_filled_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/a").write_text("old")
    for accident in (OSError("no space left"), KeyboardInterrupt()):
        with pytest.raises(type(accident)), files.replacing(tmp_path / "a") as new:
            new.write_text("half")
            raise accident
        for folder in ("b", "c"):
            with pytest.raises(type(accident)), files.filling(tmp_path / folder) as new:
                (new / "a").write_text("half")
                raise accident
    assert (tmp_path / "a").read_text() == (tmp_path / "c/a").read_text() == "old" and len([*tmp_path.rglob("*")]) == 3
    for content in ("one", "two"):
        with files.filling(tmp_path / "deep/out") as new:
            (new / "sub").mkdir()
            (new / "sub/a").write_text(content)
        (tmp_path / "deep/out/mine").touch()
    assert (tmp_path / "deep/out/sub/a").read_text() == "two"
    assert sorted(path.name for path in (tmp_path / "deep/out").iterdir()) == ["mine", "sub"]


def test_old_parts_are_removed_and_what_a_living_process_writes_stays(tmp_path):
    long_ago = time.time() - files.DAY - 9
    (tmp_path / ".theirs.tmp").touch()
    for i in range(4):
        (tmp_path / f"{files.PART}{i}").mkdir()
        (tmp_path / f"{files.PART}{i}/weights").touch()
    for path in (f"{files.PART}4", f"{files.PART}5"):
        (tmp_path / path).touch()
    (tmp_path / f"{files.PART}6").symlink_to(tmp_path / ".theirs.tmp")
    for path in ("0", "0/weights", "1/weights", "2", "4"):  # 1 is a new folder, 2 a folder with a new file
        os.utime(tmp_path / f"{files.PART}{path}", (long_ago, long_ago))
    with files.replacing(tmp_path / "a") as new, files.filling(tmp_path / "b") as folder:
        files.remove_parts(tmp_path)
        assert new.exists() and folder.exists()
    left = {path.name.removeprefix(files.PART) for path in tmp_path.glob(f"{files.PART}*")}
    assert left == {"1", "2", "3", "5", "6"} and (tmp_path / ".theirs.tmp").exists()
    files.remove_parts(tmp_path, seconds=-9)
    assert not [*tmp_path.glob(f"{files.PART}*")] and (tmp_path / ".theirs.tmp").exists()


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, os.strerror(number)) for number in (errno.ENOLCK, errno.ENOTSUP)), NotImplementedError(),
        *(OSError(number, os.strerror(number)) for number in (errno.EACCES, errno.ENOSPC, errno.EROFS)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_drive_without_locks_is_named_and_another_error_is_one_line(tmp_path, monkeypatch, caplog, error):
    def refuses(*arguments, **options):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuses)
    if getattr(error, "errno", None) in (errno.ENOLCK, errno.ENOTSUP, None):
        with files.locked(tmp_path):
            assert "its drive has no locks" in caplog.text
        return
    with pytest.raises(FileError, match=f"{files.LOCK}: {error.strerror}$"), files.locked(tmp_path):
        pass
    with pytest.raises(FileError, match="No such file"), files.locked(tmp_path / "missing"):
        pass


def test_a_lock_follows_no_link_and_hides_no_error_of_its_body(tmp_path):
    with pytest.raises(BlockingIOError), files.locked(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "of standard output")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / files.LOCK).unlink(missing_ok=True)
    (tmp_path / files.LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(FileError), files.locked(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


def started(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


HOLD = """
import os, sys, time
from models.common import files
with files.locked(sys.argv[1]):
    if os.fork(): print("held", flush=True)  # the child lives on, as a data loader's worker does for a while
    time.sleep(5)
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_two_processes_exclude_each_other_and_a_kill_frees_the_lock(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "a"
    path.touch()
    other = started(HOLD, path)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(FileError, match="another run writes there; wait for its end"), files.locked(path):
        pass
    other.send_signal(signal.SIGKILL)
    other.wait()
    time.sleep(0.1)
    with files.locked(path), pytest.raises(FileError, match="another run"), files.locked(path):
        pass
    assert [*tmp_path.iterdir()] == ([path] if kind == "file" else [])
    if kind == "file":
        with files.locked(path):  # by its name
            files.replace(path, b"new")
            with pytest.raises(FileError), files.locked(path):
                pass


FULL_DISK = """
import os, resource, signal, sys
import torch
from safetensors.torch import save_file
from models.common import files
def fill(folder):
    with files.filling(folder) as new:
        files.replace(new / "config.json", "x" * 9999)
def save(folder):
    with files.filling(folder) as new:
        save_file({"a": torch.zeros(9999)}, new / "model.safetensors")
def stream(path):
    with files.replacing(path) as new, open(new, "wb") as file:
        file.write(b"x" * 9999)
out, table = sys.argv[1:]
files.append(table, b"first")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))
for write in (fill, save, stream, lambda path: files.replace(path, "x" * 9999), lambda _: files.append(table, b"x" * 9999)):
    try: write(out)
    except files.FileError as error: print(error.errno, error)
"""  # noqa: E501


def test_a_full_disk_is_one_line_that_names_the_file_and_a_torn_line_is_cut_off(tmp_path):
    """RLIMIT_FSIZE stores a part of a write, as a full disk does."""
    out, table = tmp_path / "out", tmp_path / "table"
    lines = started(FULL_DISK, out, table).communicate()[0].splitlines()
    assert [line.split(": ")[0].split(" ", 1)[1] for line in lines] == [*[str(out)] * 4, str(table)], lines
    assert lines[4].split()[0] in (str(errno.ENOSPC), str(errno.EFBIG))
    assert [*tmp_path.iterdir()] == [table] and table.read_bytes() == b"first"


def test_what_cannot_be_written_is_one_line_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    for name, words in (("x" * 300, "too long"), ("a/b", "File exists|Not a d"), ("nul\0l", "null")):
        with pytest.raises(FileError, match=words):
            files.replace(tmp_path / name, "")
        if "\0" not in name:
            with pytest.raises(FileError, match=words), files.filling(tmp_path / name):
                pass

    def refuses(path, flags, mode=0o777, **options):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr(os, "mkdir", refuses)
    for write in (files.replacing, files.filling, lambda path: files.filling(path / "new/sub")):
        with pytest.raises(FileError, match=f"^{tmp_path}.*: Permission denied$") as error, write(tmp_path / "b"):
            pass
        assert files.PART not in str(error.value)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("given", [None, 0o700])
def test_new_files_follow_the_umask_and_nobody_else_reads_a_private_one_while_it_is_written(
    tmp_path, request, given, umask
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o755)
    request.addfinalizer(partial(os.umask, os.umask(umask)))
    for name, mode in (("a", 0o600), ("out/a", 0o600), ("shared", 0o640)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    with files.replacing(tmp_path / "a", given) as new, files.filling(tmp_path / "out") as folder:
        assert (new.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
        (folder / "a").write_text("new")
        save_file({"a": torch.zeros(9)}, folder / "b")  # private, too
    files.replace(tmp_path / "shared", b"new")
    files.replace(tmp_path / "new", b"new")
    with files.filling(tmp_path / "more") as folder:
        (folder / "a").touch()
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "out/a", "shared", "out", "more")]
    assert modes == [given or 0o600, 0o600, 0o640, 0o755, 0o777 & ~umask]
    for name in ("out/b", "new", "more/a"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~umask, name


def test_without_fcntl_and_o_nofollow_a_link_is_not_followed(tmp_path, monkeypatch):
    """Windows has none."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
        monkeypatch.delattr(os, name)
    test_a_link_is_replaced_and_not_followed(tmp_path)
    files.append(tmp_path / "table", b"a\n")
    assert files.read_bytes(tmp_path / "table") == b"a\n"
