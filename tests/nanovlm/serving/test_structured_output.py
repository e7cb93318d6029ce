"""JSON answers: whatever the model would say, the answer follows the schema."""

import json
import re
import sys

import pytest

from support.schema import SCHEMA, assert_fits
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, answer_of, user_message

pytest.importorskip("llguidance", reason="no llguidance; pip install 'nanovlm[structured]'")

ASKED = {"model": "nanovlm", "messages": user_message(QUESTIONS[1], SAMPLE_URL)}
FORMAT = {"type": "json_schema", "json_schema": {"name": "image", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize("options", [{}, {"temperature": 3.0, "seed": 1}, {"frequency_penalty": 1.0}])
def test_answer_follows_the_schema(served, options):
    choice = served.post(ASKED | options | {"response_format": FORMAT}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert_fits(json.loads(choice["message"]["content"]))


def test_an_answer_that_repeats_itself_is_incomplete(served):
    words = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "^a{99}$"}}}
    body = ASKED | {"response_format": words, "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    choice = served.post(body).json()["choices"][0]
    assert choice["message"]["content"] == '"aaaa' and choice["finish_reason"] == "length"


def test_json_object_is_an_object(served):
    body = ASKED | {"response_format": {"type": "json_object"}, "max_tokens": 400, "temperature": 2.0, "seed": 4}
    choice = served.post(body).json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.full
def test_openai_client_parses_an_answer(served):
    import pydantic

    client = served.openai_client()

    class Image(pydantic.BaseModel):
        square: bool
        n: int = pydantic.Field(ge=0, le=9)

    chat = client.chat.completions.parse(**ASKED, response_format=Image)
    assert isinstance(chat.choices[0].message.parsed, Image)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objec"},
        {"$ref": "#"},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},  # found at the second token
        {"type": "object", "properties": {f"a{i}": {} for i in range(2100)}},
        {"enum": ["x" * 50_000]},
        {"type": "string", "pattern": "^(a{1000}){1000}$"},  # takes 13 seconds
        {"allOf": [{"pattern": f"^([ab])*a([ab]){{{i}}}$"} for i in range(10, 40)]},  # needs gigabytes
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_schema_that_is_not_possible_is_refused(served, schema, caplog):
    response = served.post(ASKED | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    error = response.json()["error"]
    reasons = "response_format: .*(cannot be followed: .|shorten|simpler patterns)"
    assert response.status_code == 400 and re.match(reasons, error["message"])
    assert len(error["message"]) < 300 and "NoExtension" not in error["message"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "no failure of the server"


def test_missing_library_names_the_extra(embedded, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with RunningServer(embedded) as server:
        error = server.post(ASKED | {"response_format": FORMAT}).json()["error"]
        assert "pip install 'nanovlm[structured]'" in error["message"] and error["param"] == "response_format"
        assert answer_of(server.post(ASKED | {"response_format": {"type": "text"}}))
