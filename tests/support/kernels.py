"""The levels of the kernel library that tests run at."""

import os
import shlex
import shutil
import subprocess

from models.inference.kernels.load import available_levels


def has_compiler() -> bool:
    command = shlex.split(os.environ.get("CC", "")) or ["cc" if shutil.which("cc") else "gcc"]
    try:
        return subprocess.run([*command, "-E", "-x", "c", os.devnull], capture_output=True).returncode == 0
    except OSError:
        return False


LEVELS = available_levels() if has_compiler() else []  # lowest first
