"""A server of the embedded model, ways to slow it down, and a browser."""

import shutil
import threading
import time

import pytest

from support.serving import RunningServer

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


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


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install 'nanovlm[test-web]'")
    with sync_api.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome", playwright.chromium.executable_path)
        found = next((path for path in map(shutil.which, names) if path), None)
        if found is None:
            pytest.skip("no Chromium here; playwright install chromium, or apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()
