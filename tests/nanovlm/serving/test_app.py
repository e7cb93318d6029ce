"""The routes beside chat completions, and the shape of their errors."""

import re
import shutil
import subprocess

import pytest

from nanovlm.serving.app import STATIC
from support.serving import http, user_message


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_of_the_page_is_javascript():
    subprocess.run(["node", "--check", STATIC / "page.js"], check=True)


def test_routes_answer_without_the_version_and_to_head(served, embedded):
    assert http.get(f"{served.url}/models").json() == http.get(f"{served.url}/v1/models").json()
    model = http.get(f"{served.url}/models/nanovlm").json()
    assert model["max_model_len"] == embedded.model.cfg.lm_max_position_embeddings
    messages = user_message("Hello?")
    whole, short = (served.post({"messages": messages}, f"{prefix}/chat/completions").json() for prefix in ("/v1", ""))
    assert whole["object"] == short["object"] and whole["usage"] == short["usage"]
    for path in ("/", "/health", "/models", "/v1/models", "/v1/models/nanovlm", "/sample.png"):
        head, get = (http.request(method, served.url + path) for method in ("HEAD", "GET"))
        assert head.status_code == 200 and not head.content
        assert head.headers["content-type"] == get.headers["content-type"]


def test_http_errors_have_the_same_shape(served):
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405)):
        response = http.request(method, served.url + path)
        assert response.status_code == status and path in response.json()["error"]["message"]
    assert response.headers["allow"] == "POST"


def test_page_loads_only_from_its_own_server(served):
    kinds = {"/": "text/html", "/page.css": "text/css", "/page.js": "javascript", "/sample.png": "png"}
    for path, kind in kinds.items():
        response = http.get(served.url + path)
        assert response.status_code == 200 and kind in response.headers["content-type"]
        assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert http.get(served.url + path, params={"file": "/etc/passwd"}).content == response.content
        if path != "/sample.png":
            assert not re.search(r"https?:|//[a-z]|@import|<style|style=|onclick", response.text)
