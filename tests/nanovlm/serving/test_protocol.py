"""Requests that cannot be answered: each gets one sentence in OpenAI's shape, whatever it is."""

import pytest

from nanovlm import Captioner
from nanovlm.processing.processor import Processor
from nanovlm.serving.options import Limits
from support import png
from support.serving import SAMPLE_URL, RunningServer, data_url, http, user_message

INVALID = {
    "no messages": ({"messages": []}, "messages"),
    "a tool message": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "an empty question": ({"messages": user_message("  ")}, "the last user message is empty"),
    "only a system message": ({"messages": [{"role": "system", "content": "x"}]}, "no message of a user"),
    "an answer to be continued": (
        {"messages": [*user_message("?"), {"role": "assistant", "content": "A"}]},
        "the last message is the assistant's",
    ),
    "a video": (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}]},
        "messages.0.content.0: Input tag 'video_url' found using 'type' does not match any of the expected tags",
    ),
    "an image from the assistant": (
        {"messages": [*user_message("?"), user_message("?", SAMPLE_URL)[0] | {"role": "assistant"}]},
        "only user messages may contain images, not assistant ones",
    ),
    "a negative temperature": ({"temperature": -1}, "temperature=-1"),
    "a negative seed": ({"seed": -2}, "seed=-2"),
    "a long question": ({"messages": user_message("ring " * 9999)}, "lm_max_position_embeddings"),
    "many stops": ({"stop": ["x"] * 9}, "stop"),
    "stream as text": ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    "tools": ({"tools": [{"type": "function"}]}, "tools is not supported by this server; leave it out"),
    "several answers": ({"n": 2}, "n is not supported by this server; leave it out"),
    "log-probabilities": ({"logprobs": True}, "logprobs is not supported"),
    "alternatives": ({"top_logprobs": 2}, "top_logprobs is not supported"),
    "biases": ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
    "one repetition": ({"repetition_detection": {"max_pattern_size": 4, "min_count": 1}}, "COUNT of 0"),
    "no completion tokens": ({"max_completion_tokens": 0}, "max_completion_tokens: Input should be greater"),
}
INVALID_IMAGES = {
    "http://127.0.0.1/a.png": "start it with --allow-remote",
    "/etc/passwd": "is not an image URL",
    "data:image/png,abc": "without base64",
    "data:image/png;base64,a$b=": "invalid base64",
    "data:image/png;base64,": "image 1: an empty file",
    data_url(b"hello"): "image 1: not an image",
    "aGVsbG8=": "image 1: ",
    "abcd" * 30: "image 1: ",
    " " * 10**6 + "!": "image 1: ",  # in no more time than others
    SAMPLE_URL[: len(SAMPLE_URL) // 2 // 4 * 4]: "image 1: ",
    data_url(png(9000, 9000)): "more than 40,000,000 pixels",
}
INVALID |= {
    f"image {url[:40]}": ({"messages": user_message("?", url)}, message) for url, message in INVALID_IMAGES.items()
}
INVALID["a hundred images"] = ({"messages": user_message("?", *[SAMPLE_URL] * 100)}, "show fewer")


@pytest.mark.parametrize("name", INVALID)
def test_invalid_request_gets_one_sentence(served, name):
    change, message = INVALID[name]
    response = served.post({"messages": user_message("?")} | change)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error") and message in error["message"]
    assert len(error["message"].splitlines()) == 1 and len(error["message"]) < 300
    assert error["code"] == "invalid_image" or not name.startswith("image")
    assert error["param"].partition(".")[0] in change and "max_new_tokens" not in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":' * 50_000, b"[" * 100_000, b'{"model": "\\ud800"}']
)
def test_body_that_is_no_request_is_refused(served, body):
    response = served.post(body)
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "text", "text": 1}, "text"),
        ({"type": "text"}, "text"),
        ({"type": "image_url", "image_url": {"url": 1}}, "image_url.url"),
    ],
)
def test_error_names_the_path_of_the_clients_field(served, part, field):
    error = served.post({"messages": [{"role": "user", "content": [part]}]}).json()["error"]
    assert error["param"] == f"messages.0.content.0.{field}"
    answer = {"type": "json_schema", "json_schema": {"schema": 1}}
    error = served.post({"messages": user_message("?"), "response_format": answer}).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"


def test_fields_that_change_nothing_are_accepted(served):
    body = {"messages": user_message("?"), "n": 1, "logprobs": False, "top_logprobs": None, "logit_bias": {}}
    assert served.post(body | {"max_tokens": 1}).status_code == 200


def test_tools_are_ignored_if_none_may_be_called(served):
    body = {"messages": user_message("?"), "tools": [{"type": "function"}], "tool_choice": "none", "max_tokens": 1}
    assert served.post(body).status_code == 200


def test_body_that_is_too_long_gets_413(embedded):
    with RunningServer(embedded, Limits(max_body=50_000)) as server:
        for body in (b"x" * 100_000, {"messages": user_message("?" * 60_000)}):
            response = server.post(body)
            assert response.status_code == 413 and "more than 50,000 bytes" in response.json()["error"]["message"]
        chunks = (b"x" * 1000 for _ in range(100))  # without a Content-Length
        assert http.post(f"{server.url}/v1/chat/completions", content=chunks).status_code == 413


def test_first_of_many_errors_is_enough(served):
    """Each error takes a kilobyte."""
    error = served.post({"messages": [{"role": "user", "content": [1] * 90_000}]}).json()["error"]
    assert error["param"].endswith(".0")


def test_text_longer_than_the_context_is_not_tokenized(embedded):
    class Untouched(type(embedded.tokenizer)):
        def encode(self, text):
            assert len(text) <= 16 * self.cfg.lm_max_position_embeddings, "its longest token has 16 characters"
            return super().encode(text)

    tokenizer = Untouched(embedded.tokenizer.backend, embedded.tokenizer.cfg)
    captioner = Captioner(embedded.model, Processor(embedded.processor.cfg, tokenizer))
    with RunningServer(captioner) as server:
        error = server.post({"messages": user_message("a" * 2_000_000)}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "2,000,0" in error["message"]
        assert server.post({"messages": user_message("a " * 400), "max_tokens": 1}).status_code == 200
