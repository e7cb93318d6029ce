"""Chat completions give the same text, and the same log-probabilities, whole or streamed."""

import json

import pytest
import torch

from models.inference.requests import TokenLogprobs
from nanovlm import SAMPLE
from nanovlm.serving.response_formats import ChatFormat, TextDelta, Usage
from support.serving import QUESTIONS, chat


def expected_logprobs(embedded, token_ids, n_top):
    """For each of the ids after the sample's prompt: its log-probability and the n_top most likely, by one forward."""
    ids, tiles = embedded.prepare(SAMPLE)
    with torch.no_grad():
        logits, _ = embedded.model(torch.tensor([ids + token_ids]), torch.cat(tiles))
    rows = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    return [(float(row[one]), row.topk(n_top).values.tolist()) for one, row in zip(token_ids, rows)]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models(client, embedded, stream):
    response = chat(client, logprobs=True, top_logprobs=3, max_tokens=12, stream=stream)
    choices = [chunk.choices[0] for chunk in response] if stream else response.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    text = embedded.caption(SAMPLE, max_new_tokens=12)
    assert "".join(token.token for token in tokens) == text
    assert b"".join(bytes(token.bytes) for token in tokens) == text.encode()
    token_ids = embedded.tokenizer.encode(text)
    for token, (logprob, top) in zip(tokens, expected_logprobs(embedded, token_ids, 3), strict=True):
        assert token.logprob == pytest.approx(logprob, abs=1e-3)
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(top, abs=1e-3)
        assert token.top_logprobs[0].token == token.token, "greedy"


def test_logprobs_end_with_the_text(client):
    whole = chat(client, logprobs=True).choices[0]
    assert "".join(token.token for token in whole.logprobs.content) == whole.message.content
    assert all(token.top_logprobs == [] for token in whole.logprobs.content)
    assert chat(client, max_tokens=2).choices[0].logprobs is None


def test_impossible_token_has_a_number_in_json():
    impossible = TextDelta("a", ((5, TokenLogprobs(float("-inf"), [(6, float("-inf"))])),))
    response = ChatFormat("1", "m", str).response([impossible], ["stop"], Usage(1, 1))
    assert "Infinity" not in json.dumps(response) and "-9999.0" in json.dumps(response)


def test_bad_words_and_biases_exclude_and_favor_tokens(client, embedded):
    def answer(**options):
        return chat(client, max_tokens=12, **options).choices[0].message.content

    tokenizer, free = embedded.tokenizer, answer()
    banned = answer(extra_body={"bad_words": ["green"]})
    assert "green" in free and "green" not in banned
    assert banned == embedded.caption(SAMPLE, QUESTIONS[0], ban=("green",), max_new_tokens=12)
    [*_, favored] = tokenizer.encode(" heart")
    text = answer(logit_bias={str(favored): 100})
    assert text == tokenizer.decode([favored] * 12)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["heart", "ring"]}}}
    assert answer(logit_bias={str(favored): 100}, response_format=schema) in ('"heart"', '"ring"')


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_repeats_itself_stops_and_says_why(client, stream):
    heart = {"logit_bias": {"5": 100}, "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    response = chat(client, extra_body=heart, stream=stream, logprobs=True)
    chunks = list(response) if stream else [response]
    last = chunks[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "repetition")
    assert sum(len(choice.logprobs.content) for chunk in chunks for choice in chunk.choices if choice.logprobs) == 4
