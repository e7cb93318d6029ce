"""A server of the embedded model, and ways to slow it down."""

import threading
import time

import pytest

from support.serving import RunningServer


@pytest.fixture(scope="session")
def served(embedded):
    with RunningServer(embedded) as server:
        yield server


@pytest.fixture(params=["plain", pytest.param("openai", marks=pytest.mark.full)])
def client(served, request):
    return served.client() if request.param == "plain" else served.openai_client()


@pytest.fixture
def slow():
    """A step takes 30 ms longer."""
    return lambda: time.sleep(0.03)


@pytest.fixture
def gate():
    """An event; with before_step=gate.wait no step runs before it is set."""
    gate = threading.Event()
    yield gate
    gate.set()
