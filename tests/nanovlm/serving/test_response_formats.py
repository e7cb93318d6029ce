"""Chat completions and responses give the same text, and the same log-probabilities, whole or streamed."""

import json

import pytest
import torch

from models.inference.requests import TokenLogprobs
from nanovlm import SAMPLE
from nanovlm.serving.response_formats import ChatFormat, TextDelta, Usage
from support.serving import QUESTIONS, SAMPLE_URL, chat, user_message


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


IMAGE_PART = {"type": "input_image", "image_url": SAMPLE_URL, "detail": "original"}
RESPONSES_INPUT = [{"role": "user", "content": [IMAGE_PART, {"type": "input_text", "text": QUESTIONS[0]}]}]


def test_response_is_the_same_answer(client, embedded):
    response = client.responses.create(model="nanovlm", input=RESPONSES_INPUT)
    assert response.output_text == embedded.caption(SAMPLE) and response.status == "completed"
    usage = chat(client).usage
    assert (response.usage.input_tokens, response.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    text = client.responses.create(model="nanovlm", input="Hello?", max_output_tokens=1)
    assert text.output_text == embedded.caption(None, "Hello?", max_new_tokens=1)
    assert text.status == "incomplete" and text.incomplete_details.reason == "max_output_tokens"


def test_response_continues_a_conversation(client):
    first = client.responses.create(model="nanovlm", input=RESPONSES_INPUT)
    more = [*RESPONSES_INPUT, *(item.model_dump() for item in first.output), {"role": "user", "content": QUESTIONS[1]}]
    second = client.responses.create(model="nanovlm", input=more, instructions="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        *user_message(QUESTIONS[0], SAMPLE_URL),
        {"role": "assistant", "content": first.output_text},
        *user_message(QUESTIONS[1]),
    ]
    assert second.output_text == chat(client, messages).choices[0].message.content


def test_response_is_streamed_as_events(served, embedded):
    stream = served.client().responses.create(input=RESPONSES_INPUT, top_logprobs=1, stream=True)
    assert_events_are(embedded.caption(SAMPLE), list(stream))


@pytest.mark.full
def test_response_is_streamed_to_the_openai_client(served, embedded):
    with served.openai_client().responses.stream(model="nanovlm", input=RESPONSES_INPUT, top_logprobs=1) as stream:
        assert_events_are(embedded.caption(SAMPLE), list(stream))
        assert stream.get_final_response().output_text == embedded.caption(SAMPLE)


def assert_events_are(text, events):
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert final.output_text == text and final.status == "completed"
    assert "".join(one.token for one in final.output[0].content[0].logprobs) == text


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
