"""A lock file that keeps a second run away from what a run writes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from nanovlm.errors import UsageError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def file_lock(path: Path, target: str, by_process: bool = False) -> Iterator[None]:
    """Hold a lock file while this process writes to target; UsageError if another process holds it.

    The system releases the lock however a process ends, so the file of a killed process blocks nobody. by_process is
    for a process with forked workers, which would hold its lock for seconds after a kill; its own threads do not see
    the lock. Where the file cannot be written or the file system has no locks, nothing is locked.
    """
    with contextlib.ExitStack() as stack:
        while fcntl:
            try:
                file = stack.enter_context(open(path, "ab"))
                (fcntl.lockf if by_process else fcntl.flock)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{target}: another run writes there; wait for its end, or name another") from None
            except OSError:
                break
            with contextlib.suppress(FileNotFoundError):  # the previous holder may just have removed it
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    stack.callback(path.unlink, missing_ok=True)  # while the lock is still held
                    break
        yield
