"""Files: the one module that opens, replaces, appends to, locks and removes them, for `models` and `nanovlm`.

Reading takes regular files only, so a pipe or a device blocks nobody. Writing goes to a new random name beside the
target, which nobody can have prepared, and takes the target's place at once; a link is replaced, not followed. Only
what this module made is removed. Whatever the system refuses is a FileError. `tests/test_architecture.py` finds calls
elsewhere that do the same.
"""

import contextlib
import errno
import io
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from models.common.errors import BusyError, FileError

PathLike = str | os.PathLike[str]

PART = ".nanovlm-part-"  # and 16 random digits: names of what is being written
LOCK = ".nanovlm.lock"  # in a locked folder; of a file .NAME.nanovlm.lock
DAY = 24 * 3600
SETTINGS_BYTES = 64 << 20  # of a configuration, a tokenizer, a schema; the largest in use has 17 MB
UNSUPPORTED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}  # chmod, fsync on CIFS, NTFS, S3
NO_LOCKS = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}  # of drives that cannot lock
FULL = {errno.ENOSPC, errno.EFBIG, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}

logger = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------------- reading


def opened(path: PathLike) -> io.BufferedReader:
    """Open a regular file to read. FileError for a folder, a pipe, a device, and where the system refuses."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def check_regular(path: PathLike) -> None:
    """FileError unless path is a regular file; for libraries that open it by name."""
    with _errors(path):
        check_kind(path, os.stat(path).st_mode)


def check_kind(path: PathLike, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = f"{'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file"
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise FileError(f"{os.fspath(path)} is {kind}", number, kind)


def read_bytes(path: PathLike, limit: int | None = None) -> bytes:
    """Content of a file. FileError if it has more than limit bytes."""
    with opened(path) as file, _errors(path):
        data = file.read(-1 if limit is None else limit + 1)
    if limit is not None and len(data) > limit:
        reason = f"has more than {limit:,} bytes"
        raise FileError(f"{os.fspath(path)} {reason}", errno.EFBIG, reason)
    return data


def read_pipe(path: PathLike) -> bytes:
    """Content of a file or a pipe, for a name that a person gives to be read to its end, as the shell's <(...)."""
    with _errors(path), open(path, "rb") as file:
        return file.read()


def read_text(path: PathLike, limit: int | None = SETTINGS_BYTES, errors: str = "strict") -> str:
    """Text of a UTF-8 file, with or without a byte order mark. FileError if it has more than limit bytes."""
    try:
        text = read_bytes(path, limit).decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        message = f"{os.fspath(path)} is not UTF-8 ({error}); save it as UTF-8"
        raise FileError(message, errno.EILSEQ, f"not UTF-8 ({error})") from None
    return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)  # as open() reads text


def file_error(path: PathLike, error: Exception) -> FileError:
    """A FileError of a system's error about path."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return FileError(f"{os.fspath(path)}: {reason}", getattr(error, "errno", None), reason)


@contextlib.contextmanager
def _errors(path: PathLike) -> Iterator[None]:
    """Turn a system's error into a FileError of path."""
    try:
        yield
    except FileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise file_error(path, error) from None


def _open(path: PathLike, flags: int, mode: int = 0o666, follow: bool = True) -> int:
    """Open a regular file; a link only if it may be followed, also where the system has no O_NOFOLLOW."""
    options = ["O_CLOEXEC", "O_BINARY", "O_NONBLOCK", *([] if follow else ["O_NOFOLLOW"])]
    with _errors(path):
        if not follow and os.path.islink(path):
            raise FileError(f"{os.fspath(path)} is a link, which is not followed; remove it", errno.ELOOP)
        try:
            descriptor = os.open(path, flags | sum(getattr(os, name, 0) for name in options), mode)
        except PermissionError:
            if os.path.isdir(path):
                check_kind(path, stat.S_IFDIR)  # Windows says only that it opens none
            raise
        try:
            check_kind(path, os.fstat(descriptor).st_mode)
        except FileError:
            os.close(descriptor)
            raise
        return descriptor


# ----------------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def replacing(path: PathLike, mode: int | None = None) -> Iterator[Path]:
    """`with replacing(path) as new:` write the file `new`, which takes the place of path at the end.

    On an error path stays as it was. Permissions are mode, or else those of the file that is replaced, but nobody else
    can read it before the end. Folders on the way to path are made. FileError if the file cannot be written.
    """
    path = Path(path)
    with _errors(path):
        if path.is_dir():  # os.replace would say so after the work
            raise FileError(f"{path} is a folder; name a file", errno.EISDIR)
        mode = _mode_of(path) if mode is None else mode
    make_folder(path.parent)
    new = _part_name(path.parent)
    with _write_errors(path, new):
        os.close(_open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600))
        try:
            if mode is None:
                mode = stat.S_IMODE(new.stat().st_mode)
            yield new
            _store(new, mode)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def replace(path: PathLike, content: str | bytes) -> None:
    """Write a file, text as UTF-8, whole or not at all; see `replacing`."""
    with replacing(path) as new:
        new.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextlib.contextmanager
def filling(path: PathLike) -> Iterator[Path]:
    """`with filling(path) as new:` fill the folder `new`, which becomes path at the end and goes on an error.

    If path exists, its files of the same names are replaced, each atomically; others stay. Old parts beside them are
    removed. FileError if the folder cannot be written, or a folder of path is a link.
    """
    path = Path(path)
    with _errors(path):
        beside = path if path.exists() else path.parent  # another folder may be on another disk
    make_folder(beside)
    remove_parts(beside)
    new = _part_name(beside)
    with _write_errors(path, new):
        new.mkdir()
        mode = stat.S_IMODE(new.stat().st_mode)
        try:
            with _where_supported():
                new.chmod(0o700)
            yield new
            files = [file for file in new.rglob("*") if file.is_file()]
            for file in files:
                _store(file, _mode_of(path / file.relative_to(new)) or mode & 0o666)
            if not path.exists():
                with _where_supported():
                    new.chmod(mode)
                os.rename(new, path)
                return
            for file in files:
                target = path / file.relative_to(new)
                if target.parent != path and target.parent.is_symlink():
                    raise FileError(f"{target.parent} is a link; remove it, or name another folder", errno.ELOOP)
                target.parent.mkdir(exist_ok=True)
                os.replace(file, target)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def append(path: PathLike, line: bytes) -> None:
    """Add a line to a file, which is made if it is missing, in one write: a kill leaves it whole, or torn as the last.

    FileError for a link, and for a write of which only a part was stored; that part is cut off.
    """
    descriptor = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=False)
    with os.fdopen(descriptor, "rb+", buffering=0) as file, _errors(path):
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def make_folder(path: PathLike) -> None:
    """Make a folder, and those on the way to it, unless it is there."""
    with _errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def scratch_folder(inside: PathLike | None = None) -> Iterator[Path]:
    """A folder for the time of a `with`, inside another or among the system's own; only this user can read it."""
    with tempfile.TemporaryDirectory(prefix=PART, dir=inside) as name:
        yield Path(name)


def _part_name(folder: Path) -> Path:
    return folder / f"{PART}{os.urandom(8).hex()}"


def _mode_of(path: Path) -> int | None:
    """The permissions of a regular file, if there is one."""
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None
    return None


def _store(file: Path, mode: int) -> None:
    """Give file its mode, which safetensors makes private, and store it on the disk."""
    with open(file, "r+b") as handle:
        with _where_supported():
            file.chmod(mode)
        with _where_supported():
            os.fsync(handle.fileno())


@contextlib.contextmanager
def _where_supported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


@contextlib.contextmanager
def _write_errors(path: Path, new: Path) -> Iterator[None]:
    """Turn what the system, or safetensors, says of a full disk, or of the part new, into a FileError of path."""
    try:
        yield
    except Exception as error:
        safetensors = sys.modules.get("safetensors")  # not imported here: the build of a wheel does without
        is_theirs = safetensors is not None and isinstance(error, safetensors.SafetensorError)
        is_ours = isinstance(error, OSError) and (error.errno in FULL or new.name in str(error))
        if is_ours or is_theirs:
            raise file_error(path, error) from error
        raise


def remove(path: PathLike) -> None:
    """Remove a file or a link of ours, if it is there."""
    with _errors(path):
        Path(path).unlink(missing_ok=True)


def remove_folder(path: PathLike) -> None:
    """Remove a folder of ours with all that is in it; a link to a folder is removed, not followed."""
    path = Path(path)
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def remove_parts(folder: PathLike, seconds: float = DAY) -> None:
    """Remove what killed processes left half written in a folder: parts in which nothing was written for so long.

    Who holds the folder's lock, and is the only one to write there, need not wait.
    """
    for part in Path(folder).glob(f"{PART}*"):
        with contextlib.suppress(OSError):
            content = [] if part.is_symlink() else part.rglob("*")
            if time.time() - max(file.lstat().st_mtime for file in (part, *content)) >= seconds:
                remove_folder(part) if part.is_dir() else remove(part)


@contextlib.contextmanager
def locked(path: PathLike) -> Iterator[None]:
    """Keep other runs out of a folder, or of a file, by a hidden file in it, or beside it.

    The system frees the lock however a process ends. BusyError if another run holds it, FileError if the hidden file
    cannot be made. A drive without locks is named in the log.
    """
    import filelock  # here, as the build of a wheel does without

    path = Path(path)
    with _errors(path):
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    name = path / LOCK if is_folder else path.with_name(f".{path.name}{LOCK}")
    lock = filelock.FileLock(name, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise BusyError(f"{path}: another run writes there; wait for its end, or name another", errno.EAGAIN) from None
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in NO_LOCKS:
            raise file_error(name, error) from None
        logger.warning("%s: its drive has no locks; start no second run there", path)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # Windows removes no open file
                name.unlink()
        lock.release()
