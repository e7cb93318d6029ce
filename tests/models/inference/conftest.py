"""The levels of the kernel library that this machine can run."""

import pytest

from models.inference.kernels.load import FOR_TESTS
from support.kernels import LEVELS

BEST = [level for level in LEVELS if level not in FOR_TESTS][-1:]
OTHERS = [pytest.param(level, marks=pytest.mark.full) for level in LEVELS if level not in BEST]


@pytest.fixture(params=[*OTHERS, *BEST, "none"])
def level(request, monkeypatch) -> str:
    """The best level, and "none", the plain modules; all others in the full tier."""
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", request.param)
    return request.param
