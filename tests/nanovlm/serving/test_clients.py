"""Client libraries, each in its ordinary use, and requests as front ends send them; others test the openai client."""

import asyncio
import json

import pytest

from nanovlm import SAMPLE
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, http, user_message

pytestmark = pytest.mark.full
OPTIONS = {"temperature": 0, "max_tokens": 100}


def test_litellm(served, embedded, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no request to GitHub
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/any-name", "api_base": f"{served.url}/v1", "api_key": "none", **OPTIONS}
    messages = user_message(QUESTIONS[0], SAMPLE_URL)
    answer = litellm.completion(messages=messages, **options)
    assert answer.choices[0].message.content == embedded.caption(SAMPLE)
    chunks = litellm.completion(messages=messages, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == embedded.caption(SAMPLE)
    answer = asyncio.run(litellm.acompletion(messages=messages, presence_penalty=0.1, **options))
    assert answer.choices[0].message.content


def test_langchain(served, embedded):
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    chat = langchain.ChatOpenAI(model="gpt-4o-mini", base_url=f"{served.url}/v1", api_key="none", temperature=0)
    parts = [{"type": "text", "text": QUESTIONS[0]}, {"type": "image_url", "image_url": {"url": SAMPLE_URL}}]
    question = HumanMessage(content=parts)
    assert chat.invoke([question]).content == embedded.caption(SAMPLE)
    assert "".join(chunk.content for chunk in chat.stream([question])) == embedded.caption(SAMPLE)
    talk = [SystemMessage("Be brief."), AIMessage("Hello!"), question, AIMessage("A ring."), HumanMessage("Where?")]
    assert chat.invoke(talk).response_metadata["finish_reason"] == "stop"
    assert [answer.content for answer in chat.batch([[question]] * 3)] == [embedded.caption(SAMPLE)] * 3


def test_llm(served, embedded, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    llm = pytest.importorskip("llm")
    entry = {"model_id": "mine", "model_name": "nanovlm", "api_base": f"{served.url}/v1", "vision": True}
    # YAML, which includes JSON
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    model = llm.get_model("mine")
    model.key = "none"
    attachment = llm.Attachment(path=str(SAMPLE))
    assert model.prompt(QUESTIONS[0], attachments=[attachment]).text() == embedded.caption(SAMPLE)
    talk = model.conversation()
    assert talk.prompt(QUESTIONS[0], attachments=[attachment], stream=False).text() == embedded.caption(SAMPLE)
    assert talk.prompt(QUESTIONS[1]).text()


def test_open_webui(embedded):
    """The list of models, a streamed chat, and the title and tags that it asks for in the background."""
    front_end = {"origin": "http://localhost:3000"}  # "direct connections" come from the browser
    with RunningServer(embedded, allow_origin=("http://localhost:3000",)) as server:
        models = http.get(f"{server.url}/v1/models", headers=front_end | {"authorization": "Bearer none"}).json()
        model = models["data"][0]["id"]
        chat = {"stream": True, "model": model, "messages": user_message(QUESTIONS[0], SAMPLE_URL)}
        chat["stream_options"] = {"include_usage": True}
        events = server.post(chat, headers=front_end).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        assert text == embedded.caption(SAMPLE) and chunks[-1]["usage"]["total_tokens"]
        task = {"model": model, "messages": user_message("### Task:\nGenerate a concise, 3-5 word title.")}
        task |= {"stream": False, "max_completion_tokens": 1000}
        assert server.post(task).status_code == 200, "the context has no room for 1,000 tokens more"


def test_clients_raise_their_own_error_beyond_the_context(served, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.exceptions import ContextOverflowError

    long = "ring " * 1500
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/x", user_message(long), api_base=f"{served.url}/v1", api_key="none")
    with pytest.raises(ContextOverflowError):
        langchain.ChatOpenAI(model="x", base_url=f"{served.url}/v1", api_key="none").invoke(long)
