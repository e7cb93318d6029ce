"""Files: the one module that opens, replaces, appends to, locks and removes them, for `models` and `nanovlm`.

Reading takes regular files only, so a pipe or a device blocks nobody. Writing goes to a new random name beside the
target, which nobody can have prepared, and takes the target's place at once; a link is replaced, not followed. Only
what this module made is removed. `tests/test_architecture.py` finds calls elsewhere that do the same.
"""

import contextlib
import errno
import functools
import io
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from models.errors import BusyError, FileError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None

PathLike = str | os.PathLike[str]

WEIGHTS = "model.safetensors"  # of a model's folder
# Thumbnails of a Synology, resource forks of macOS archives, and what file systems keep at the top of a disk
NO_IMAGE_FOLDERS = {"@eaDir", "__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information"}
PART = ".nanovlm-part-"  # and 16 random digits: names of what is being written
SETTINGS_BYTES = 64 << 20  # of a configuration, a tokenizer, a schema; the largest in use has 17 MB
UNSUPPORTED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}  # chmod, fsync on CIFS, NTFS, S3

logger = logging.getLogger(__name__)
_locks: set[int] = set()  # descriptors that hold a lock


# ----------------------------------------------------------------------------------------------------------- reading


def walk(folder: PathLike, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and its subfolders, each with the sorted names of its files; what is hidden is left out.

    So are folders of thumbnails and of file systems, and model folders below the first one, whose images are reports.
    Links to folders are followed, but no folder is read twice.
    """
    seen = set()
    for current, subfolders, names in os.walk(folder, onerror=onerror, followlinks=True):
        place = os.path.realpath(current)
        if place in seen or (current != os.fspath(folder) and WEIGHTS in names):
            subfolders.clear()
            continue
        seen.add(place)
        visible = [name for name in subfolders if name[0] != "." and name not in NO_IMAGE_FOLDERS]
        subfolders[:] = sorted(visible, key=lambda name: (os.path.islink(os.path.join(current, name)), name))
        yield current, sorted(name for name in names if name[0] != ".")


@contextlib.contextmanager
def opened(path: PathLike) -> Iterator[io.BufferedReader]:
    """Open a regular file to read. FileError for a folder, a pipe, a device, and where the system refuses."""
    descriptor = _open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_kind(path, os.fstat(descriptor).st_mode)
    except FileError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        yield file


def check_regular(path: PathLike) -> None:
    """FileError unless path is a regular file; for libraries that open it by name."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise file_error(path, error) from None
    check_kind(path, mode)


def check_kind(path: PathLike, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = f"{'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file"
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise FileError(f"{os.fspath(path)} is {kind}", number, kind)


def read_bytes(path: PathLike, limit: int | None = None) -> bytes:
    """Content of a file. FileError if it has more than limit bytes."""
    with opened(path) as file:
        data = file.read(-1 if limit is None else limit + 1)
    if limit is not None and len(data) > limit:
        reason = f"has more than {limit:,} bytes"
        raise FileError(f"{os.fspath(path)} {reason}", errno.EFBIG, reason)
    return data


def read_pipe(path: PathLike) -> bytes:
    """Content of a file or a pipe, for a name that a person gives to be read to its end, as the shell's <(...)."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise file_error(path, error) from None


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


def _open(path: PathLike, flags: int, mode: int = 0o666) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), mode)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if os.path.islink(path) and getattr(error, "errno", None) == errno.ELOOP:
            raise FileError(f"{os.fspath(path)} is a link, which is not followed; remove it", errno.ELOOP) from None
        raise file_error(path, error) from None


# ----------------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def replacing(path: PathLike, mode: int | None = None) -> Iterator[Path]:
    """`with replacing(path) as new:` write the file `new`, which takes the place of path at the end.

    On an error path stays as it was. Permissions are mode, or else those of the file that is replaced. Folders on the
    way to path are made. OSError if the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():  # os.replace would say so after the work
        raise FileError(f"{path} is a folder; name a file", errno.EISDIR)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _part_name(path.parent)
    descriptor = _open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with _flock(descriptor):
            if mode is None:
                mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
                with contextlib.suppress(OSError):
                    old = path.lstat().st_mode
                    mode = stat.S_IMODE(old) if stat.S_ISREG(old) else mode
            with _safetensors_errors(path):
                yield new
            _store(new, mode)
            os.replace(new, path)
    except OSError as error:
        raise error if isinstance(error, FileError) else file_error(path, error) from None  # not of the part's name
    finally:
        os.close(descriptor)
        new.unlink(missing_ok=True)


def replace(path: PathLike, content: str | bytes) -> None:
    """Write a file, text as UTF-8, whole or not at all; see `replacing`."""
    with replacing(path) as new:
        new.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextlib.contextmanager
def filling(path: PathLike) -> Iterator[Path]:
    """`with filling(path) as new:` fill the folder `new`, which becomes path at the end and goes on an error.

    If path exists, its files of the same names are replaced, each atomically; others stay. What killed processes left
    of the same is removed. OSError if the folder cannot be written, or a folder of path is a link.
    """
    path = Path(path)
    beside = path if path.exists() else path.parent  # another folder may be on another disk
    beside.mkdir(parents=True, exist_ok=True)
    remove_parts(beside)
    new = _part_name(beside)
    new.mkdir()
    try:
        with locked(new, is_optional=True), _safetensors_errors(path):
            yield new
            files = [file for file in new.rglob("*") if file.is_file()]
            for file in files:
                _store(file, new.stat().st_mode & 0o666)
            if not path.exists():
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
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = _open(path, flags)
    try:
        check_kind(path, os.fstat(descriptor).st_mode)
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) == len(line):
                return
            problem = FileError(f"{os.fspath(path)}: {os.strerror(errno.ENOSPC)}", errno.ENOSPC)
        except OSError as error:
            problem = file_error(path, error)
        os.ftruncate(descriptor, size)
        raise problem
    finally:
        os.close(descriptor)


def truncate(path: PathLike, size: int) -> None:
    """Cut a regular file that is no link to its first size bytes."""
    descriptor = _open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        check_kind(path, os.fstat(descriptor).st_mode)
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(inside: PathLike | None = None) -> Iterator[Path]:
    """A folder for the time of a `with`, inside another or among the system's own; only this user can read it."""
    with tempfile.TemporaryDirectory(prefix=PART, dir=inside) as name:
        yield Path(name)


def _part_name(folder: Path) -> Path:
    return folder / f"{PART}{os.urandom(8).hex()}"


def _store(file: Path, mode: int) -> None:
    """Give file its mode, which safetensors makes private, and store it on the disk, where the drive knows either."""
    with open(file, "r+b") as handle:
        for action, *arguments in ((os.chmod, file, mode), (os.fsync, handle.fileno())):
            try:
                action(*arguments)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise


@contextlib.contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    """safetensors raises an error of its own where the disk is full."""
    try:
        yield
    except Exception as error:
        safetensors = sys.modules.get("safetensors")  # not imported here: the build of a wheel does without
        if safetensors is not None and isinstance(error, safetensors.SafetensorError):
            raise FileError(f"{path} cannot be written: {error}") from error
        raise


# ---------------------------------------------------------------------------------------------------------- removing


def remove(path: PathLike) -> None:
    """Remove a file or a link of ours, if it is there."""
    Path(path).unlink(missing_ok=True)


def remove_folder(path: PathLike) -> None:
    """Remove a folder of ours with all that is in it; a link to a folder is removed, not followed."""
    path = Path(path)
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def remove_parts(folder: PathLike) -> None:
    """Remove what killed processes left half written in a folder; what a living one writes is locked, and stays."""
    for part in Path(folder).glob(f"{PART}*"):
        with contextlib.suppress(OSError), locked(part, is_optional=True) as is_held:
            if is_held:  # on a drive without locks nobody knows whether its process lives
                remove_folder(part) if part.is_dir() else remove(part)


# ----------------------------------------------------------------------------------------------------------- locking


@contextlib.contextmanager
def locked(path: PathLike, *, is_optional: bool = False) -> Iterator[bool]:
    """Keep other processes out of a folder, or of a file, by a lock on itself: no file is made. True if it is held.

    The system frees the lock however a process ends; forked children do not hold it. BusyError if another process holds
    it, FileError if the path cannot be opened. A drive without locks is named in the log, unless is_optional.
    """
    is_folder = os.path.isdir(path)
    no_follow = 0 if is_folder else getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    while True:
        try:  # NFS locks only what is open for writing
            descriptor = _open(path, no_follow | (os.O_RDONLY if is_folder else os.O_RDWR))
        except FileError:
            if is_folder and (is_optional or fcntl is None):
                yield False
                return
            raise
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                is_held = stack.enter_context(_flock(descriptor))
            except BlockingIOError:
                message = f"{os.fspath(path)}: another run writes there; wait for its end, or name another"
                raise BusyError(message, errno.EAGAIN) from None
            if not is_held and not is_optional:
                logger.warning("%s: its drive has no locks; start no second run there", os.fspath(path))
            if is_held and not _is_same(path, descriptor):  # the last holder replaced it
                continue
            yield is_held
            return


@contextlib.contextmanager
def _flock(descriptor: int) -> Iterator[bool]:
    """Lock an open file until it is closed; False where the drive has no locks. BlockingIOError if it is locked."""
    is_held = False
    if fcntl is not None:
        _free_in_children()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            raise
        except OSError:
            pass
    _locks.add(descriptor)
    try:
        yield is_held
    finally:
        _locks.discard(descriptor)


@functools.cache
def _free_in_children() -> None:
    """Close locks in forked children, such as a data loader's workers, which would hold them after a kill."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_locks)


def _close_locks() -> None:
    for descriptor in _locks:
        os.close(descriptor)


def _is_same(path: PathLike, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
