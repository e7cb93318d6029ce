"""What test_probe.py runs in another process, to which functions of a test module cannot be sent."""

import os
import signal


def be_killed(folder, run):
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_file_and_fail(folder, run):
    folder.mkdir()
    (folder / "file").write_text("")
    raise ValueError(str(folder))
