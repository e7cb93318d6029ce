"""Answers by a JSON schema, in Python and on the command line; the server's are in tests/nanovlm/serving."""

import json
from pathlib import Path

import pytest
import torch

from models.decoding import GREEDY, SamplingParams
from models.inference.caches import TiledImage
from models.inference.continuous_batching import ContinuousBatch
from models.inference.request import Request
from nanovlm import SAMPLE, ChatSession
from nanovlm.captioner import Stats
from nanovlm.errors import InputError
from support.cli import assert_usage_error
from support.schema import SCHEMA, assert_fits

pytest.importorskip("llguidance", reason="no llguidance; pip install 'nanovlm[structured]'")
pytestmark = pytest.mark.usefixtures("workdir")


def test_tokens_that_the_schema_forces_are_read_together_and_change_no_answer(embedded):
    answers, n_steps, eos = [], [], embedded.tokenizer.eos_token_ids
    ids, tiles = embedded.prepare(str(SAMPLE), "What is it?")
    for is_forced in (False, True):
        batch, requests, steps = ContinuousBatch(embedded.inference, eos_token_id=eos), [], 0
        for sampling in (GREEDY, SamplingParams(temperature=2.0, seed=3), GREEDY):
            (grammar,) = embedded.structured_output.make_processors(SCHEMA, 1)
            process = grammar if is_forced else lambda ids, logits, grammar=grammar: grammar(ids, logits)
            requests.append(Request(ids, [TiledImage(torch.cat(tiles))], sampling, grammar=process))
            batch.add(requests[-1])
        requests[2].grammar, requests[2].sampler = None, None
        while batch.waiting or batch.running:
            batch.step()
            steps += not requests[0].finished
        n_steps.append(steps)
        answers.append([request.output for request in requests])
    assert answers[0] == answers[1] and n_steps[1] < n_steps[0], "the keys of the object are forced"
    expected = json.loads(embedded.tokenizer.decode(answers[1][0]))
    assert embedded.caption(SAMPLE, "What is it?", schema=SCHEMA) == expected


def test_each_row_of_a_batch_follows_the_schema_by_itself(embedded):
    stats = Stats()
    alone = embedded.caption(SAMPLE, schema=SCHEMA)
    rows = embedded.samples(SAMPLE, n=6, schema=SCHEMA, temperature=3.0, seed=1, stats=stats)
    rows += [*embedded.captions([SAMPLE] * 2, schema=SCHEMA), *embedded.ask(SAMPLE, ["n?", "color?"], schema=SCHEMA)]
    for value in (alone, *rows):
        assert_fits(value)
    assert rows[6] == rows[7] == alone and len({json.dumps(row) for row in rows[:6]}) > 1
    assert stats.finish_reasons == ["stop"] * 6
    assert json.loads("".join(embedded.stream(SAMPLE, schema=SCHEMA))) == alone
    assert_fits(json.loads("".join(ChatSession(embedded, [SAMPLE]).ask("n?", schema=SCHEMA))))
    assert embedded.caption(SAMPLE, schema={"enum": [0]}) == 0
    numbers = {"type": "array", "items": {"enum": [0]}, "minItems": 40, "maxItems": 40}
    assert embedded.caption(SAMPLE, schema=numbers) == [0] * 40, "this is no repetition to end"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 3}, "max_new_tokens ended the answer before its JSON did"),
        ({"schema": {"type": "no"}}, "schema: the JSON schema cannot be followed"),
    ],
)
def test_what_cannot_be_is_one_line(embedded, options, words):
    with pytest.raises(InputError, match=words):
        embedded.caption(SAMPLE, **({"schema": SCHEMA} | options))


def test_a_table_has_a_column_for_each_property(generate, image_folder):
    Path("schema.json").write_text(json.dumps(SCHEMA))
    command = ["--json-schema", "schema.json", "--max-new-tokens", "60", "--out", "captions.jsonl", image_folder]
    assert generate(*command, model=None)[0] == 0
    text = Path("captions.jsonl").read_text("utf-8")
    for row in map(json.loads, text.splitlines()):
        value = json.loads(row["text"])
        assert_fits(value)
        cells = {name: row[name] for name in value}
        assert cells == value
    assert len(text.splitlines()) >= 5 and generate(*command, model=None)[0] == 0
    assert Path("captions.jsonl").read_text("utf-8") == text


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (None, [], "No such file"),
        ("{", [], "is not JSON"),
        ('{"type": "no"}', [], "cannot be followed"),
        (json.dumps(SCHEMA), ["--start-with", "A"], "excludes start_with"),
        (json.dumps(SCHEMA), ["--out", "a.csv", "--prefix", "x"], "no text can be added"),
    ],
)
def test_a_schema_that_is_none_is_refused_before_any_work(generate, content, flags, words):
    if content:
        Path("schema.json").write_text(content)
    assert_usage_error(generate("good.png", "--json-schema", "schema.json", *flags), words)
