"""Request bodies."""

from nanovlm.serving.admission import Limits
from support.serving import RunningServer, http, user_message


def test_body_that_is_too_long_gets_413(embedded):
    with RunningServer(embedded, Limits(max_body_bytes=50_000)) as server:
        for body in (b"x" * 100_000, {"model": "nanovlm", "messages": user_message("?" * 60_000)}):
            response = server.post(body)
            assert response.status_code == 413 and "more than 50,000 bytes" in response.json()["error"]["message"]
        chunks = (b"x" * 1000 for _ in range(100))  # without a Content-Length
        assert http.post(f"{server.url}/v1/chat/completions", content=chunks).status_code == 413
