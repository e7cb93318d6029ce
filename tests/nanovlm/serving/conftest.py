"""A server of the embedded model, and ways to slow it down."""

import threading
import time

import pytest

from models.inference.continuous_batching import ContinuousBatch
from nanovlm import Captioner
from support.serving import Running


@pytest.fixture(scope="module")
def embedded():
    return Captioner.from_pretrained(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def served(embedded):
    with Running(embedded) as running:
        yield running


@pytest.fixture
def client(served):
    with served.client() as client:
        yield client


@pytest.fixture
def slow(monkeypatch):
    """A token takes 30 ms."""
    step = ContinuousBatch.step
    monkeypatch.setattr(ContinuousBatch, "step", lambda batch: time.sleep(0.03) or step(batch))


@pytest.fixture
def gate(monkeypatch):
    """No token is said before it is set."""
    step, gate = ContinuousBatch.step, threading.Event()
    monkeypatch.setattr(ContinuousBatch, "step", lambda batch: gate.wait(30) and step(batch))
    yield gate
    gate.set()
