"""Stop strings."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovlm.serving.streaming import StopStringStreamer


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
