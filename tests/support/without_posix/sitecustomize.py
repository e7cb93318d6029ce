"""Python as on Windows, as far as Linux can play it: first on PYTHONPATH, it also counts in processes that are started.

Left in place are names that Python itself needs where `sys.platform` is "linux". An open file, or one that is mapped
into memory, can be neither replaced nor removed, and a file that is opened without os.O_BINARY ends lines by CR LF.
"""

import _io
import builtins
import io
import multiprocessing
import os
import signal
import sys
import warnings

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "curses", "syslog"}
NAMES = [
    "fork", "forkpty", "geteuid", "getuid", "getegid", "getgid", "getgroups", "setuid", "getpgid", "killpg", "setsid",
    "nice", "mkfifo", "mknod", "chown", "lchown", "fchown", "fchmod", "sched_getaffinity", "sched_setaffinity",
    "sched_yield", "getloadavg", "sysconf", "confstr", "pathconf", "posix_fallocate", "posix_fadvise", "pread",
    "pwrite", "sendfile", "openpty", "ttyname", "ctermid", "chroot", "sync", "fdatasync",
    "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_SYNC", "O_DIRECT", "O_NOATIME", "O_TMPFILE", "O_PATH",
    "O_NOCTTY",
]  # fmt: skip
SIGNALS = [
    "SIGKILL", "SIGHUP", "SIGALRM", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGUSR2", "setitimer", "alarm", "sigwait",
]  # fmt: skip
LINUX = ("/proc", "/sys", "/dev/shm", "/dev/full", "/dev/zero", "/dev/fd", "/dev/stdin", "/dev/tty")
TEXT = 1 << 30  # O_BINARY is a flag that Linux does not know


class NoModules:
    """Finds none of MODULES."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def is_missing(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(LINUX)


def refuse(path):
    raise FileNotFoundError(2, "No such file or directory", os.fspath(path))


def without_linux(function):
    def call(path, *args, **options):
        return refuse(path) if is_missing(path) else function(path, *args, **options)

    return call


def in_use(path):
    """The open or mapped file at path, by the real /proc."""
    try:
        found = real_lstat(path)
    except OSError:
        return False
    here = (found.st_dev, found.st_ino)
    for descriptor in real_listdir("/proc/self/fd"):
        try:
            other = os.fstat(int(descriptor))
        except OSError:  # of the listing itself
            continue
        if (other.st_dev, other.st_ino) == here:
            return True
    with real_io_open("/proc/self/maps") as maps:
        return any(line.split(maxsplit=5)[4] == str(found.st_ino) for line in maps)


def unless_in_use(function, n_paths):
    def call(*paths, **options):
        is_temporary = sys._getframe(1).f_globals["__name__"] == "tempfile"  # Windows itself removes such a file
        for path in paths[:n_paths]:
            if not is_temporary and in_use(path):
                raise PermissionError(13, "The process cannot access the file because it is being used", str(path))
        return function(*paths, **options)

    return call


def opened(path, flags, mode=0o777, *, dir_fd=None):
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if is_missing(path):
        refuse(path)
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))
    descriptor = real_open(path, flags & ~TEXT, mode)
    if not flags & TEXT:
        texts.add(identity(descriptor))
    return descriptor


def identity(descriptor):
    """The file behind a descriptor, whose number is used again."""
    found = os.fstat(descriptor)
    return descriptor, found.st_dev, found.st_ino


def written(descriptor, data):
    if identity(descriptor) not in texts:
        return real_write(descriptor, data)
    real_write(descriptor, bytes(data).replace(b"\n", b"\r\n"))
    return len(data)


real_open, real_write, real_lstat, real_listdir, real_io_open = os.open, os.write, os.lstat, os.listdir, _io.open
texts = set()

if os.environ.get("NANOVLM_WITHOUT_POSIX"):
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, NoModules())
    for module, names in ((os, NAMES), (signal, SIGNALS)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.O_BINARY = TEXT
    os.open, os.write = opened, written
    os.supports_dir_fd = os.supports_fd = set()
    for name in ("stat", "lstat", "listdir", "scandir", "access"):
        setattr(os, name, without_linux(getattr(os, name)))
    for name, n_paths in {"unlink": 1, "remove": 1, "replace": 2, "rename": 2}.items():
        setattr(os, name, unless_in_use(getattr(os, name), n_paths))
    builtins.open = io.open = without_linux(_io.open)
    multiprocessing.set_start_method("spawn")
    warnings.filterwarnings("ignore", category=EncodingWarning)
    # what Python would read or write in the locale's code page
    warnings.filterwarnings("error", category=EncodingWarning, module=r"(models|nanovlm|eval)\b")
