"""Tests of what Windows lacks are skipped there, by what they name."""

import inspect
import os
import re

import pytest

PARTS = re.compile(
    r"mkfifo|symlink|chmod|umask|geteuid|setrlimit|\bfcntl|openpty|os\.fork|os\.kill|SIG(TERM|KILL|ALRM)|/(dev|proc)/"
)


def pytest_collection_modifyitems(items):
    """Skip on Windows what names a part of POSIX, in the test itself or in a function of its table."""
    for item in items if os.name == "nt" else ():
        given = getattr(item, "callspec", None)
        functions = [item.function, *filter(inspect.isfunction, given.params.values() if given else ())]
        if used := PARTS.search("".join(map(inspect.getsource, functions))):
            item.add_marker(pytest.mark.skip(reason=f"Windows has no {used[0]}, or another"))
