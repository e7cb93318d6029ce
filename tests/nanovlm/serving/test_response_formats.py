"""Chat completions, whole or streamed: what excludes tokens, and how an answer says why it ended."""

import pytest

from nanovlm import SAMPLE
from support.serving import QUESTIONS, chat


def test_bad_words_exclude_tokens(client, embedded):
    def answer(**options):
        return chat(client, max_tokens=12, **options).choices[0].message.content

    banned = answer(extra_body={"bad_words": ["green"]})
    assert "green" in answer() and "green" not in banned
    assert banned == embedded.caption(SAMPLE, QUESTIONS[0], ban=("green",), max_new_tokens=12)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_repeats_itself_stops_and_says_why(client, stream):
    favored = {"repetition_penalty": 0.1, "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    response = chat(client, extra_body=favored, stream=stream)
    last = (list(response) if stream else [response])[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "repetition")
