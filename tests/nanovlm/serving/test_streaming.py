"""Stop strings; test_properties.py has the same for any text."""

import pytest

from nanovlm.serving.streaming import StopStringStreamer


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a ring and a star", [], "a ring and a star"),
        ("a ring and a star", ["nowhere", "d a", " st"], "a ring an"),
        ("a ring", ["ring", "a ring"], ""),
        ("stars", ["starsh"], "stars"),
        ("an é🙂 b", ["🙂"], "an é"),
    ],
)
def test_text_ends_before_the_first_stop_string(text, stops, expected, embedded):
    tokenizer = embedded.tokenizer
    streamer, streamed = StopStringStreamer(tokenizer, stops), ""
    for token_id in [*tokenizer.encode(text), tokenizer.eos_token_id]:
        streamed += streamer.feed(token_id, "stop" if token_id == tokenizer.eos_token_id else None)
        if streamer.finish_reason:
            break
    assert (streamed, streamer.finish_reason) == (expected, "stop")
