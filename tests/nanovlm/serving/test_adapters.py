"""A server of one model and several adapters: each request is answered by the one that it names, all in one batch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from models.lora import adapt, adapters, merge, write_adapters
from nanovlm import SAMPLE, Captioner
from support.serving import QUESTIONS, SAMPLE_URL, RunningServer, answer_of, http, user_message

MODELS = ("first", "second", "nanovlm")


@pytest.fixture(scope="module")
def captioners(embedded, tmp_path_factory):
    """The embedded model by its name, and with two adapters merged into it by theirs; and the adapters' folders."""
    found, folders = {"nanovlm": embedded}, {}
    for seed, name in enumerate(("first", "second")):
        model = Captioner.from_pretrained(dtype="float32").model
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            adapt(model, 4, 8.0)
            for module in adapters(model).values():
                module.lora_B.weight.normal_(std=0.5)
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        folders[name].mkdir()
        write_adapters(folders[name], model)
        found[name] = Captioner(merge(model), embedded.processor)
    return found, folders


@pytest.fixture(scope="module")
def server(embedded, captioners):
    adapted = {name: embedded.with_adapter(folder).inference for name, folder in captioners[1].items()}
    with RunningServer(embedded, adapters=adapted, caches=(2**24, 2**24)) as server:
        yield server


def test_requests_of_one_batch_get_the_answers_of_the_models_that_they_name(server, captioners):
    asked = [(name, question) for question in QUESTIONS for name in MODELS] * 2

    def ask(name, question):
        answer = server.post({"model": name, "messages": user_message(question, SAMPLE_URL), "max_tokens": 24})
        assert answer.json()["model"] == name
        return answer_of(answer)

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(ask, *zip(*asked)))
    wanted = [captioners[0][name].caption(SAMPLE, question, max_new_tokens=24) for name, question in asked]
    assert answers == wanted and len(set(wanted[:3])) == 3


def test_models_are_listed_and_the_first_adapter_answers_others(server, captioners):
    listed = http.get(f"{server.url}/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("first", "nanovlm"), ("second", "nanovlm"), ("nanovlm", None),
    ]  # fmt: skip
    assert http.get(f"{server.url}/v1/models/second").json() == listed[1]
    assert http.get(f"{server.url}/v1/models/third").status_code == 404
    body = {"messages": user_message(QUESTIONS[0], SAMPLE_URL), "max_tokens": 24}
    answer = server.post(body)
    assert answer.json()["model"] == "first"
    assert answer_of(answer) == captioners[0]["first"].caption(SAMPLE, QUESTIONS[0], max_new_tokens=24)
