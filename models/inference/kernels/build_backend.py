"""The build backend of pyproject.toml: setuptools, after the kernels were compiled into their folder.

Without a C compiler the package is built all the same, and its user is told at first use.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parents[3]))
from models.inference.kernels.load import FOLDER, FOR_TESTS, LEVELS, build


def _build_kernel(level):
    try:
        build(level, FOLDER)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no kernels of level {level}: {getattr(error, 'stderr', None) or error}", file=sys.stderr)


def _build(hook, *arguments, **named):
    """Compile every level, two at a time, in place of older libraries, and call setuptools' hook."""
    for old in FOLDER.glob("kernels-*.so"):
        old.unlink()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_build_kernel, [level for level in LEVELS if level not in FOR_TESTS]))
    return hook(*arguments, **named)


build_wheel = partial(_build, build_meta.build_wheel)
build_editable = partial(_build, build_meta.build_editable)
