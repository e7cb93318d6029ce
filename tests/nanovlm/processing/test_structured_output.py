"""Answers by a JSON schema, in Python and on the command line; the server's are in tests/nanovlm/serving."""

import json
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovlm import SAMPLE, ChatSession
from nanovlm.errors import InputError, SchemaError
from support.schema import SCHEMA, assert_fits

pytest.importorskip("llguidance", reason="no llguidance; pip install 'nanovlm[structured]'")
pytestmark = pytest.mark.usefixtures("workdir")


def test_tokens_that_the_schema_forces_are_read_together_and_change_no_answer(embedded):
    answers = []
    for is_forced in (False, True):
        request, n_steps = embedded.request(SAMPLE, "What is it?", schema=SCHEMA), 0
        if not is_forced:
            request.grammar = partial(type(request.grammar).__call__, request.grammar)  # without forced_tokens
        batch = embedded.batch(1)
        batch.add(request)
        while batch.waiting or batch.running:
            n_steps += 1
            batch.step()
        answers.append((request.output, n_steps))
    assert answers[0][0] == answers[1][0] and answers[1][1] < answers[0][1], "the keys of the object are forced"


def obj(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


T, N = {"type": "string"}, {"type": "integer"}
RECURSIVE = obj(c={"type": "array", "items": {"$ref": "#/definitions/t"}})
POINT = {"$defs": {"p": obj(x=N)}} | obj(a={"$ref": "#/$defs/p"})
NESTED = obj(a={"type": "array", "items": {"type": "array", "items": obj(b=N)}})
BOTH = {"allOf": [obj(a=N), obj(b=N)]}
EITHER = {"anyOf": [obj(a=N), obj(b=N)]}
SHARED = {"$defs": {"t": obj(a=N)}}
DEEP = reduce(lambda inner, _: obj(a=inner), range(400), N)
REF, ODD = {"$ref": "#/$defs/t"}, {"$ref": "#/properties/a/oneOf/0"}
TREE = {"t": {"allOf": [{"$ref": "#/$defs/u"}, obj(a=N)]}, "u": obj(c={"type": "array", "items": REF})}
SELF = {"t": obj(a={"allOf": [REF], "description": "x"}) | {"required": []}}
INNER = {"$defs": {"t": {"allOf": [{"$ref": "#"}, obj(b=N)]}}, "properties": {"a": N, "c": REF}}
SCHEMAS = {  # as people write them -> a value that they mean, and one that they do not
    "closed by default": (obj(a=N), {"a": 1}, {"a": 1, "b": 2}),
    "open if it says so": (obj(a=N) | {"additionalProperties": True}, {"a": 1, "b": 2}, {"b": 2}),
    "optional keys": (obj(a=N, b=T) | {"required": ["b"]}, {"b": ""}, {"a": 1}),
    "an enum, and null": (obj(a={"enum": ["x", None]}), {"a": None}, {"a": "y"}),
    "nested arrays": (NESTED, {"a": [[{"b": 1}], []]}, {"a": [[{"b": 1, "c": 2}]]}),
    "$ref and $defs": (POINT, {"a": {"x": 1}}, {"a": {"x": 1, "y": 2}}),
    "definitions, recursive": ({"definitions": {"t": RECURSIVE}, "$ref": "#/definitions/t"}, {"c": [{"c": []}]},
        {"c": [], "d": 1}),
    "anyOf": ({"anyOf": [obj(a=N), obj(b=T)]}, {"b": "x"}, {"b": "x", "c": 1}),
    "allOf": (BOTH, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
    "allOf of one": ({"allOf": [obj(a=N)]}, {"a": 1}, {"a": 1, "b": 2}),
    "allOf in allOf": ({"allOf": [BOTH, obj(c=N)]}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3, "d": 4}),
    "allOf inside of an object": (obj(x=BOTH), {"x": {"a": 1, "b": 2}}, {"x": {"a": 1, "b": 2, "c": 3}}),
    "properties beside allOf": (obj(c=N) | {"allOf": [obj(a=N)]}, {"c": 3, "a": 1}, {"c": 3, "a": 1, "b": 2}),
    "properties beside anyOf": (obj(c=N) | {"anyOf": [obj(a=N), obj(b=N)]}, {"c": 3, "b": 1}, {"c": 3, "b": 1, "d": 2}),
    "a name of another alternative": (obj(c=N) | EITHER, {"c": 3, "a": 1}, {"c": 3, "a": 1, "b": "x"}),
    "alternatives in allOf": ({"allOf": [EITHER, obj(c=N)]}, {"c": 3, "a": 1}, {"c": 3, "a": 1, "b": "x"}),
    "alternatives by $ref": ({"$defs": {"t": EITHER}} | obj(c=N) | REF, {"c": 3, "b": 1}, {"c": 3, "a": "x", "b": 1}),
    "a name of an alternative and of the whole": ({"allOf": [EITHER, {"properties": {"b": N}}]}, {"b": 2, "a": 1},
        {"b": "x", "a": 1}),
    "alternatives that require": (obj(a=N, b=N) | {"required": [], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"a": 1, "b": 2}, {}),
    "properties beside $ref": (SHARED | obj(b=N) | REF, {"b": 2, "a": 1}, {"b": 2, "a": 1, "c": 3}),
    "a part that says otherwise": ({"allOf": [obj(a=N), obj(b=N) | {"additionalProperties": True}]},
        {"a": 1, "b": 2, "c": 3}, {"a": 1}),
    "a definition in allOf and alone": (SHARED | obj(x=REF, y={"allOf": [REF, obj(b=N)]}),
        {"x": {"a": 1}, "y": {"a": 1, "b": 2}}, {"x": {"a": 1, "b": 2}, "y": {"a": 1, "b": 2}}),
    "a definition in allOf, closed as a whole": (SHARED | obj(x=REF, y={"allOf": [REF, obj(b=N)]}),
        {"x": {"a": 1}, "y": {"a": 1, "b": 2}}, {"x": {"a": 1}, "y": {"a": 1, "b": 2, "c": 3}}),
    "a recursive definition in allOf": (REF | {"$defs": TREE},
        {"c": [{"c": [], "a": 1}], "a": 1}, {"c": [{"c": [], "a": 1, "b": 2}], "a": 1}),
    "the schema as a part of an inner one": (obj(a=N) | INNER, {"a": 1, "c": {"a": 1, "b": 2}},
        {"a": 1, "c": {"a": 1, "b": 2, "d": 3}}),
    "a part at an odd place": (obj(a={"oneOf": [obj(x=N)]}, b={"allOf": [ODD, obj(y=N)]}),
        {"a": {"x": 1}, "b": {"x": 1, "y": 2}}, {"a": {"x": 1}, "b": {"x": 1, "y": 2, "z": 3}}),
    "an object inside of allOf's parts": ({"allOf": [obj(a=obj(b=N)), obj(c=N)]}, {"a": {"b": 1}, "c": 1},
        {"a": {"b": 1, "d": 1}, "c": 1}),
    "an object beside allOf": (obj(a=obj(b=N), c={"allOf": [obj(d=N), obj(e=N)]}),
        {"a": {"b": 1}, "c": {"d": 1, "e": 2}}, {"a": {"b": 1, "x": 1}, "c": {"d": 1, "e": 2}}),
    "a key called allOf": (obj(allOf=N), {"allOf": 1}, {"allOf": 1, "b": 2}),
    "keys called additionalProperties and $ref": (obj(additionalProperties=N, **{"$ref": T}),
        {"additionalProperties": 1, "$ref": ""}, {"additionalProperties": 1, "$ref": "", "b": 2}),
    "a value called allOf": (obj(a={"enum": ["allOf"]}), {"a": "allOf"}, {"a": "allOf", "b": 2}),
    "a key called properties": (obj(properties=obj(items=N)), {"properties": {"items": 1}}, {"items": 1}),
    "allOf of one, recursive, with a description": (REF | {"$defs": SELF}, {"a": {"a": {}}}, {"a": {"b": 1}}),
    "limits in allOf": ({"allOf": [N, {"minimum": 3}]}, 3, 2),
    "a free object": ({"type": "object"}, {"any": [1, {"b": None}]}, []),
    "a dictionary": ({"type": "object", "additionalProperties": N}, {"a": 1, "b": 2}, {"a": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_allows_what_people_mean(name, embedded):
    schema, meant, other = SCHEMAS[name]
    encode, end = embedded.tokenizer.encode, embedded.tokenizer.eos_token_id
    for value, fits in ((meant, True), (other, False)):
        grammar = embedded.structured_output.make_processor(schema)
        ids = [*encode(json.dumps(value, separators=(",", ":"))), end]
        assert (grammar.matcher.validate_tokens(ids) == len(ids)) == fits


REFUSED = {
    "parts of one value differ in 'maximum'": {"allOf": [{"maximum": 3}, {"maximum": 4}]},
    "parts of one value differ in 'anyOf'": {"allOf": [EITHER, {"anyOf": [obj(c=N)]}]},
    "a part has additionalProperties": {"allOf": [obj(a=N) | {"additionalProperties": False}, obj(b=N)]},
    "more than 1000 parts": {"allOf": [{"$ref": "#/$defs/0"}], "$defs": {
        str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)} | {"40": obj(a=N)}},
    "names no schema": {"allOf": [{"$ref": "https://example.org/a"}, obj(a=N)]},
    "required property 'b'": obj(a=N) | {"required": ["b"]},
    "nested too deeply": {"$defs": {"t": obj(a={"$ref": "#/$defs/t", "type": "object"})}, "$ref": "#/$defs/t"},
    "uniqueItems": {"uniqueItems": True}, '"not"': {"not": {}}, '"if"': {"if": {}}, "oneOf": {"oneOf": [T, T]},
    "allOf must be an array": {"allOf": 1}, "wrong type: .": {"allOf": [{"properties": 1}, obj(a=N)]},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused_by_name(words, embedded):
    with pytest.raises(SchemaError, match=f"^the JSON schema cannot be followed.*{words}"):
        embedded.structured_output.make_processor(REFUSED[words])


def test_a_dead_end_is_said_as_what_it_is(embedded):
    grammar = embedded.structured_output.make_processor(N)
    grammar([], torch.zeros(1, embedded.tokenizer.cfg.lm_vocab_size))
    parts = {"consume_tokens": list, "compute_logit_bias": bytes, "get_error": lambda: "NoExtensionBias"}
    grammar.matcher = SimpleNamespace(**parts)
    with pytest.raises(SchemaError, match="ran into a dead end after 2 tokens; ask again with another seed"):
        grammar([5, 5], torch.zeros(1, 9))


def test_each_row_of_a_batch_follows_the_schema_by_itself(embedded):
    alone = embedded.caption(SAMPLE, schema=SCHEMA)
    rows = embedded.samples(SAMPLE, n=6, schema=SCHEMA, temperature=3.0, seed=1)
    rows += [*embedded.captions([SAMPLE] * 2, schema=SCHEMA), *embedded.ask(SAMPLE, ["n?", "color?"], schema=SCHEMA)]
    for value in (alone, *rows):
        assert_fits(value)
    assert rows[6] == rows[7] == alone and len({json.dumps(row) for row in rows[:6]}) > 1
    assert json.loads("".join(embedded.stream(SAMPLE, schema=SCHEMA))) == alone
    assert_fits(json.loads("".join(ChatSession(embedded, [SAMPLE]).ask("n?", schema=SCHEMA))))
    assert embedded.caption(SAMPLE, schema={"enum": [0]}) == 0
    numbers = {"type": "array", "items": {"enum": [0]}, "minItems": 40, "maxItems": 40}
    assert embedded.caption(SAMPLE, schema=numbers) == [0] * 40, "this is no repetition to end"
    for words, options in (
        ("max_new_tokens ended the answer before its JSON did", {"max_new_tokens": 3, "schema": SCHEMA}),
        ("the JSON schema cannot be followed", {"schema": {"type": "no"}}),
        (".* nothing satisfies it", {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}),
        (".* nested too deeply", {"schema": DEEP}),
        ("has 60,0.. characters, more than 50,000", {"schema": {"const": "x" * 60_000}}),
    ):
        with pytest.raises(InputError, match=words):
            embedded.caption(SAMPLE, **options)
        if len(options) == 1:
            with pytest.raises(InputError, match=words):
                next(embedded.stream(SAMPLE, **options))


def test_a_table_has_a_column_for_each_property(generate, image_folder):
    Path("schema.json").write_text(json.dumps(SCHEMA))
    command = ["--json-schema", "schema.json", "--max-new-tokens", "60", "--out", "captions.jsonl", image_folder]
    command += ["--model", "embedded"]
    assert generate(*command, model=None)[0] == 0
    text = Path("captions.jsonl").read_text("utf-8")
    for row in map(json.loads, text.splitlines()):
        value = json.loads(row["text"])
        assert_fits(value)
        cells = {name: row[name] for name in value}
        assert cells == value
    assert len(text.splitlines()) >= 5 and generate(*command, model=None)[0] == 0
    assert Path("captions.jsonl").read_text("utf-8") == text
