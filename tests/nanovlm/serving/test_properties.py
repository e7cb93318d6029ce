"""Properties that hold for any request and any text."""

import json

import pytest

from nanovlm.serving.streaming import StopStringStreamer
from support.serving import SAMPLE_URL, user_message

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.full


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é🙂", max_size=12), stops=st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops, embedded):
    tokenizer = embedded.tokenizer
    streamer, streamed = StopStringStreamer(tokenizer, stops), ""
    for token_id in [*tokenizer.encode(text), tokenizer.eos_token_id]:
        streamed += streamer.feed(token_id, "stop" if token_id == tokenizer.eos_token_id else None)
        if streamer.finish_reason:
            break
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, negative_length = min(ends, default=(len(text), 0))
    assert streamed == text[: end + negative_length] and streamer.finish_reason == "stop"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["model", "messages", "stream", "stream_options", "n", "max_tokens", "stop", "temperature", "top_p", "seed"]
FIELDS += ["max_completion_tokens", "logprobs", "top_logprobs", "presence_penalty", "top_k", "response_format", "tools"]
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]) | ANYTHING, "content": ANYTHING}),
    max_size=3,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=3),
    messages=st.none() | MESSAGES,
)
def test_any_json_is_answered_or_refused(served, changes, messages):
    messages = user_message("?", SAMPLE_URL) if messages is None else messages
    body = {"model": "nanovlm", "max_tokens": 2, "messages": messages}
    response = served.post(json.dumps(body | changes))
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
