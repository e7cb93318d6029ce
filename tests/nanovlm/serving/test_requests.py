"""Contents of requests: each is answered as the Captioner answers, or refused in one sentence of OpenAI's shape."""

import json
import re
from functools import partial
from random import Random

import pytest

from models.common.options import SamplingParams
from nanovlm import SAMPLE, Captioner
from nanovlm.errors import SchemaError
from nanovlm.processing.conversation import images_of
from nanovlm.processing.layouts import Layout
from nanovlm.processing.layouts.smolvlm import SmolVLMLayout
from nanovlm.processing.structured_output import GrammarProcessor
from nanovlm.serving.openai_api import ChatRequest, StopStrings
from support import noise_image, png
from support.schema import SCHEMA, assert_fits
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, answer_of, chat, data_url, user_message

BARE = SAMPLE_URL.partition(",")[2]
IMAGE = {"type": "image_url", "image_url": {"url": SAMPLE_URL}}


def text(words):
    return {"type": "text", "text": words}


def message(role, words):
    return {"role": role, "content": words}


def json_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}


def content(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url):
    return {"messages": user_message("?", url)}


MANY_FIELDS = {f"f{i}": 1 for i in range(200)}


def too_much(schema):
    return json_schema(schema), "response_format: .*(cannot be followed: .|shorten|simpler patterns)"


REFUSED = {  # changes of a request, and what the error says
    "no messages": ({"messages": []}, "the last message must be the user's"),
    "a tool message": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
    "an empty question": ({"messages": user_message("  ")}, "the last user message is empty"),
    "only a system": ({"messages": [message("system", "x")]}, "the last message must be the user's"),
    "an answer last": ({"messages": [*user_message("?"), message("assistant", "A")]}, "message must be the user's"),
    "an assistant's image": ({"messages": [message("assistant", [IMAGE])]}, "only messages of the user may"),
    "a video": (content({"type": "video_url"}), "messages.0.content.0.type: Input tag 'video_url' .*'refusal'"),
    "a number": (content({"type": "text", "text": 1}), "messages.0.content.0.text: "),
    "no text": (content({"type": "text"}), "messages.0.content.0.text: Field required"),
    "Anthropic's image": (
        content({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BARE}}, text("?")),
        "messages.0.content.0.type: Input tag 'image'",
    ),
    "axolotl's image": (content(text("?"), {"type": "image", "base64": BARE}), "messages.0.content.1.type: Input tag"),
    "a URL beside its place": (content({"type": "image_url", "url": SAMPLE_URL}), "messages.0.content.0.image_url: "),
    "no type": (content({"text": "a"}), "messages.0.content.0.type: "),
    "a nested text": (content({"type": "text", "text": {"value": "a"}}), "messages.0.content.0.text: "),
    "a part alone": ({"messages": [message("user", text("a"))]}, "messages.0.content: "),
    "a bare text": (content("a"), "messages.0.content.0: "),
    "a type that is a list": (content({"type": ["text"]}), "messages.0.content.0.type: "),
    "no URL": (content({"type": "image_url", "image_url": {"url": 1}}), "messages.0.content.0.image_url.url: "),
    "many errors": (content(*[1] * 9_000), "messages.0.content.0: "),
    "a refusal by the user": (content({"type": "refusal", "refusal": "no"}), "messages.0: only the assistant refuses"),
    "a refusal beside": ({"messages": [{"role": "user", "refusal": "no"}]}, "messages.0: only the assistant refuses"),
    "a temperature": ({"temperature": -1}, "temperature=-1"),
    "a seed": ({"seed": -2}, "seed=-2 must be"),
    "a large seed": ({"seed": 2**70}, "seed=1180591620717411303424 must be at least 0 and below"),
    "no answer": ({"n": 0}, "^n is not supported by this server, except for 1; leave it out$"),
    "a penalty": ({"presence_penalty": 3}, "presence_penalty=3"),
    "many stops": ({"stop": ["x"] * 9}, "stop: "),
    "no tokens": ({"max_completion_tokens": 0}, "max_completion_tokens: 0 must be at least 1, or -1"),
    "stream as text": ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    "tools": ({"tools": [{"type": "function"}]}, "^tools is not supported by this server; leave it out$"),
    "several answers": ({"n": 2}, "^n is not supported"),
    "unknown": ({"mirostat": 2}, "^mirostat is not supported"),
    "a long question": ({"messages": user_message("ring " * 9999)}, "^prompt is too long: .*lm_max_position_embedd"),
    "a very long one": ({"messages": user_message("a" * 2_000_000)}, "^prompt is too long: 2,000,000 bytes"),
    "many emoji": ({"messages": user_message("\N{GRINNING FACE}" * 1_000_000)}, "^prompt is too long: 4,000,000 bytes"),
    "many long messages": ({"messages": user_message("a" * 9_000) * 200}, "^prompt is too long: 1,800,000 bytes"),
    "many images": ({"messages": user_message("?", *["none"] * 100)}, "^100 images of at least .*use fewer"),
    "a text beside images": ({"messages": user_message("a" * 2**21, "none")}, "^prompt is too long: 2,097,152 bytes"),
    "a remote image": (image("http://127.0.0.1/a.png"), "start it with --allow-remote"),
    "a path": (image("/etc/passwd"), "holds no image"),
    "no base64": (image("data:image/png,abc"), "without base64"),
    "wrong base64": (image("data:image/png;base64,a$b="), "invalid base64"),
    "an empty image": (image("data:image/png;base64,"), "image 1: an empty file"),
    "a text file": (image(data_url(b"hello")), "image 1: not an image"),
    "spaces": (image(" " * 10**6 + "!"), "image 1: "),  # in no more time than others
    "half an image": (image(SAMPLE_URL[: len(SAMPLE_URL) // 8 * 4]), "image 1: "),
    "many pixels": (image(data_url(png(9000, 9000))), "more than 64,000,000 pixels"),
    "many values": ({"stop": [""] * 200_000}, "^the request has more than 10,000 values; send less"),
    "many parts": (content(*[text("")] * 1001), "^messages.0.content: .*at most 1000"),
    "many fields": ({f"f{i}": 1 for i in range(9_000)}, "^an object of 9,001 fields, more than 100; send less$"),
    "many fields of a part": (content(text("") | MANY_FIELDS), "^messages.0.content.0: .*202 fields"),
    "many messages": ({"messages": user_message("?") * 1001}, "^messages: .*at most 1000"),
    "no schema": (json_schema(1), "response_format: the JSON schema cannot be followed"),
    "a wrong type": too_much({"type": "objec"}),
    "a loop": too_much({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
    "a long schema": too_much({"enum": ["x" * 50_000]}),
    "13 seconds": too_much({"type": "string", "pattern": "^(a{1000}){1000}$"}),
}


def asked(role="user", **more):
    return {"messages": [{"role": role, "content": "?"} | more, message("user", "?")]}


def picture(part=(), **inner):
    return content({"type": "image_url", "image_url": {"url": SAMPLE_URL} | inner} | dict(part))


def formatted(kind, **more):
    return {"response_format": {"type": kind} | more}


CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
UNKNOWN = {  # path of a field that is refused -> a change of a request
    "messages.0.images": asked(images=[BARE]),
    "messages.0.attachments": asked(attachments=[{"url": SAMPLE_URL}]),
    "messages.0.image_url": asked(image_url=SAMPLE_URL),
    "messages.0.text": asked(text="?"),
    "messages.0.tool_calls": asked("assistant", tool_calls=CALL),
    "messages.0.function_call": asked("assistant", function_call={"name": "f"}),
    "messages.0.audio": asked("assistant", audio={"id": "a"}),
    "messages.0.reasoning_content": asked("assistant", reasoning_content="hm"),
    "messages.0.prefix": asked("assistant", prefix=True),
    "messages.0.content.0.image_url": content(text("?") | {"image_url": SAMPLE_URL}),
    "messages.0.content.0.images": content(text("?") | {"images": [BARE]}),
    "messages.0.content.0.text": picture({"text": "?"}),
    "messages.0.content.0.detail": content({"type": "image_url", "image_url": SAMPLE_URL, "detail": "low"}),
    "messages.0.content.0.max_pixels": picture({"max_pixels": 1}),
    "messages.0.content.0.image_url.max_pixels": picture(max_pixels=100),
    "messages.0.content.0.image_url.Detail": picture(Detail="low"),
    "messages.0.content.0.refusal": content(text("?") | {"refusal": "no"}),
    "messages.0.content.0.type": content({"type": "input_image", "image_url": SAMPLE_URL}),
    "messages.0.content.1.image_url.url": content(text("?"), {"type": "image_url", "image_url": {}}),
    "response_format.schema": formatted("text", schema=SCHEMA),
    "response_format.Schema": formatted("json_object", Schema=SCHEMA),
    "response_format.json_schema": formatted("json_schema", schema=SCHEMA),
    "response_format.json_schema.schema": formatted("json_schema", json_schema={"name": "x"}),
    "response_format.json_schema.Schema": formatted("json_schema", json_schema={"schema": SCHEMA, "Schema": SCHEMA}),
    "response_format.json_schema.strict": formatted("json_schema", json_schema={"schema": SCHEMA, "strict": "yes"}),
    "response_format.type": formatted("grammar", grammar="root ::= x"),
    "response_format": {"response_format": "json_object"},
    "stream_options.x": {"stream_options": {"x": True}},
    "stream_options.continuous_usage_stats": {"stream_options": {"continuous_usage_stats": True}},
    "stream_options.include_usage": {"stream_options": {"include_usage": "yes"}},
    "extra_body": {"extra_body": {"top_k": 1}},
    "format": {"format": "json"},
    "guided_json": {"guided_json": SCHEMA},
    "tools": {"tools": [{"type": "function"}], "tool_choice": "auto"},
}


TWICE = b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
BODIES = [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":' * 50_000, b'{"model": "\\ud800"}', b'{"\\ud800": 1}', TWICE]

REFUSED |= {path: (change, re.escape(path)) for path, change in UNKNOWN.items()}


@pytest.mark.parametrize("name", [*REFUSED, *range(len(BODIES))])
def test_refusal_is_one_sentence(served, name, caplog):
    """A field of UNKNOWN is named by its path; BODIES are no requests at all."""
    change, expected = REFUSED.get(name, ({}, "."))
    if "response_format" in change:
        pytest.importorskip("llguidance")
    response = served.post(BODIES[name] if name in range(len(BODIES)) else {"messages": user_message("?")} | change)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert re.search(expected, error["message"]), error["message"]
    assert len(error["message"].splitlines()) == 1 and len(error["message"]) < 300
    if name in REFUSED:
        assert (error["param"] or "").partition(".")[0] in ["", *change] and "\\" not in error["message"]
        assert name not in UNKNOWN or error["param"] == name
        assert (error["code"] == "context_length_exceeded") == ("lm_max_position" in error["message"])
        assert error["code"] == "invalid_image" or "image 1" not in error["message"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "no failure of the server"


def test_schema_that_fails_during_the_answer_is_named(served, monkeypatch):
    pytest.importorskip("llguidance")

    def fail(self, generated, logits):
        raise SchemaError("the JSON schema cannot be followed")

    monkeypatch.setattr(GrammarProcessor, "__call__", fail)
    for stream in (False, True):
        response = served.post({"messages": user_message("?"), "stream": stream} | json_schema({"type": "integer"}))
        assert re.search(r'"response_format: the JSON.*"param": ?"response_format"', response.text)


TAKEN = [  # what clients send, without an effect
    {"stream_options": {"include_usage": False, "include_obfuscation": True}, "response_format": {"type": "text"}},
    {"user": "x", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "parallel_tool_calls": False},
    {"reasoning_effort": "low"},
    {"n": 1, "logprobs": False, "top_logprobs": None, "logit_bias": {}, "modalities": ["text"]},
    {"tools": [{"type": "function"}], "tool_choice": "none"},
    {"model": "gpt-4o", "max_tokens": 100_000, "seed": -1, "top_k": -1},
    {"max_completion_tokens": -1, "stop": None},
]


PARTS = [  # images as they send them
    {"image_url": SAMPLE_URL},
    {"image_url": {"url": SAMPLE_URL, "detail": "high"}, "cache_control": {"type": "x"}},
    {"image_url": {"url": BARE}},
    {"image_url": {"url": SAMPLE_URL, "detail": None}, "annotations": [], "text": None},
    {"image_url": "\n".join(BARE.partition("0"))},
]
TAKEN += [content({"type": "image_url"} | part, text("?")) for part in PARTS]


@pytest.mark.parametrize("change", TAKEN, ids=range(len(TAKEN)))
def test_what_clients_send_is_taken(served, embedded, change):
    answer = served.post({"messages": user_message("?", SAMPLE_URL)} | change)
    assert answer_of(answer) == embedded.caption(SAMPLE, "?")


RETURNED = {  # an assistant's message as clients send it back
    "openai": {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
    "openai's parse": {"parsed": {"a": 1}, "refusal": None, "tool_calls": []},
    "vLLM": {"reasoning_content": None, "reasoning": None, "tool_calls": [], "annotations": None},
    "LiteLLM": {"provider_specific_fields": {"refusal": None}, "name": "x", "cache_control": {"type": "ephemeral"}},
}


def test_an_answer_may_be_sent_back_as_it_came(served):
    first, answer, last = user_message("a"), message("assistant", "b"), user_message("c")
    for more in RETURNED.values():
        replies = [served.post({"messages": [*first, one, *last]}) for one in (answer, answer | more)]
        assert answer_of(replies[0]) == answer_of(replies[1])


@pytest.mark.full
def test_openais_message_may_be_sent_back(served):
    client = served.openai_client()
    reply = chat(client).choices[0].message
    for one in (reply, reply.model_dump(), reply.to_dict()):
        assert chat(client, [*user_message("a"), one, *user_message("c")]).choices


def test_low_detail_is_one_tile(tiled):
    url = data_url(noise_image(64, 64))
    with RunningServer(Captioner(*tiled)) as server:
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for detail in ("low", "high")]
        low, high = (server.post(content(part)).json()["usage"]["prompt_tokens"] for part in parts)
        assert low + 4 < high
        cfg = server.chats.captioner.processor.cfg
        n = cfg.lm_max_position_embeddings // cfg.mp_image_token_length - 1
        refusal = server.post(content(*[parts[1]] * n)).json()["error"]
        assert refusal["message"].startswith(f"prompt is too long: {n} images, of which the first")


user, assistant, system = (partial(message, role) for role in ("user", "assistant", "system"))
ALONE = {"role": "user", "content": [IMAGE]}
CHATS = [  # messages, and the texts of user and assistant by turns
    ([assistant("Hello."), user("Hi")], ["", "Hello.", "Hi"]),
    ([system("Be brief."), assistant("Hello."), user("Hi")], ["Be brief.", "Hello.", "Hi"]),
    ([user("a"), assistant("b"), user("c")], ["a", "b", "c"]),
    ([user("a"), assistant("b") | {"refusal": "No."}, user("c")], ["a", "b\nNo.", "c"]),
    ([system("Be brief."), user("What"), user("is it?")], ["Be brief.\n\nWhat\nis it?"]),
    ([ALONE, assistant("b"), user("c")], ["Who?", "b", "c"]), ([ALONE, user("c")], ["c"]),
    ([user("a"), assistant("b"), ALONE], ["a", "b", "Who?"]),
]  # fmt: skip


def arranged(layout, messages):
    chat = [message.turn for message in ChatRequest.model_validate({"messages": messages}).messages]
    return layout.arrange(None, chat, "Who?")


@pytest.mark.parametrize(("messages", "texts"), CHATS)
def test_messages_become_turns_whoever_begins(messages, texts):
    turns = arranged(Layout, messages)
    assert [(turn.role, turn.text) for turn in turns] == [*zip(["user", "assistant", "user"], texts)]
    assert len(images_of(turns[:1])) == messages.count(ALONE)


def test_adjacent_texts_are_one_as_together_they_could_spell_a_token():
    (turn,) = arranged(SmolVLMLayout, content(text("<|im"), text("_end|>"), IMAGE, text("c"))["messages"])
    assert (turn.role, [part for part in turn.parts if isinstance(part, str)]) == ("user", ["<|im_end|>", "c"])


@pytest.mark.parametrize("stream", [False, True])
def test_answers_end_at_max_tokens_and_stop_strings(client, embedded, stream):
    def complete(**options):
        response = chat(client, stream=stream, **options)
        if not stream:
            return response.choices[0].message.content, response.choices[0].finish_reason
        choices = [chunk.choices[0] for chunk in response]
        return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

    whole = embedded.caption(SAMPLE)
    assert complete() == (whole, "stop")
    assert complete(max_tokens=4) == (embedded.caption(SAMPLE, max_new_tokens=4), "length")
    assert complete(max_completion_tokens=3, max_tokens=9)[0] == embedded.caption(SAMPLE, max_new_tokens=3)
    assert complete(stop=" diamond") == (whole.partition(" diamond")[0], "stop")
    assert complete(stop=["nowhere", "w heart", "brown"]) == (whole.partition("w heart")[0], "stop")


def test_usage_chunks_and_sampling_are_openais(client, embedded):
    whole = chat(client)
    assert whole.usage.prompt_tokens == len(embedded.prepare(SAMPLE)[0]) and whole.model == "nanovlm"
    assert whole.usage.completion_tokens == len(embedded.tokenizer.encode(whole.choices[0].message.content)) + 1
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == whole.usage and chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    more = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3}
    for penalty in ("frequency_penalty", "presence_penalty"):
        options = {"temperature": 6, "top_p": 0.8, "seed": 3, penalty: 2.0}
        expected = embedded.caption(SAMPLE, max_new_tokens=9, sampling=SamplingParams(**options, **more))
        assert chat(client, max_tokens=9, extra_body=more, **options).choices[0].message.content == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 3.0, "seed": 1}, {"frequency_penalty": 1.0}])
def test_answer_follows_its_schema(served, options):
    pytest.importorskip("llguidance")
    body = {"messages": user_message(QUESTIONS[1], SAMPLE_URL)} | options
    for how in (json_schema(SCHEMA), formatted("json_object", schema=SCHEMA)):
        choice = served.post(body | how).json()["choices"][0]
        assert_fits(json.loads(choice["message"]["content"]))
        assert choice["finish_reason"] == "stop"
    assert answer_of(served.post(body | formatted("json_object"))).startswith("{")


def test_answer_is_as_long_as_the_context_allows(served, embedded):
    body = {"messages": user_message("word " * 180, SAMPLE_URL), "max_tokens": -1, "temperature": 50, "seed": 1}
    answer = served.post(body).json()
    if answer["choices"][0]["finish_reason"] == "length":  # the last token is never read
        assert answer["usage"]["total_tokens"] == embedded.model.cfg.lm_max_position_embeddings + 1


def test_body_that_is_too_large_gets_413(embedded):
    kept = []
    with RunningServer(embedded, max_body=50_000) as server:
        count = server.chats._count_arriving
        server.chats._count_arriving = lambda n_bytes: kept.append(count(n_bytes) or server.chats.arriving)
        for body in (b"x" * 100_000, {"messages": user_message("?" * 60_000)}):
            response = server.post(body)
            assert response.status_code == 413 and "more than 50,000 bytes" in response.json()["error"]["message"]
        assert server.post(json.dumps({"messages": user_message("?")}).ljust(50_000)).status_code == 200
        assert max(kept) <= 50_000, "the rest is dropped"


@pytest.mark.parametrize("seed", range(200))
def test_any_text_ends_before_its_first_stop_string(seed):
    rng = Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
    text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
    streamer, streamed, ended, size = StopStrings(stops), "", False, rng.randint(1, 4)
    for at in range(0, len(text) + size, size):
        if not ended:
            new, ended = streamer.add(text[at : at + size], at >= len(text))
            streamed += new
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, negative_length = min(ends, default=(len(text), 0))
    assert streamed == text[: end + negative_length] and ended == bool(ends)
