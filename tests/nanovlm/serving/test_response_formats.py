"""Chat completions, whole or streamed, say why an answer ended."""

import pytest

from support.serving import chat


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_repeats_itself_stops_and_says_why(client, stream):
    favored = {"repetition_penalty": 0.1, "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    response = chat(client, extra_body=favored, stream=stream)
    last = (list(response) if stream else [response])[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "repetition")
