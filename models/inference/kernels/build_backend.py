"""The build backend of pyproject.toml: setuptools, after the kernels were compiled into their folder.

Without a C compiler the package is built all the same, and its user is told at first use.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parents[3]))
from models.inference.kernels.load import FOLDER, FOR_TESTS, LEVELS, build


def build_kernels() -> None:
    """Compile every level, two at a time, in place of older libraries."""
    for old in FOLDER.glob("kernels-*.so"):
        old.unlink()

    def attempt(level: str) -> None:
        try:
            build(level, FOLDER)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no kernels of level {level}: {getattr(error, 'stderr', None) or error}", file=sys.stderr)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, [level for level in LEVELS if level not in FOR_TESTS]))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build_kernels()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    build_kernels()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
