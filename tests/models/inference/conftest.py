"""The levels of the kernel library that this machine can run."""

import pytest

from support.kernels import LEVELS


@pytest.fixture(params=[*LEVELS, "none"])
def level(request, monkeypatch) -> str:
    """Each level in turn, and "none", the plain modules."""
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", request.param)
    return request.param
