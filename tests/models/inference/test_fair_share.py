"""Steps of a batch are shared between a client of many requests and one of few."""

from itertools import count

import torch

from models.inference.continuous_batching import ContinuousBatch
from models.inference.fair_share import FairShare


def test_light_clients_get_half_of_the_time():
    """A step of all takes 6 s and one of the light client 1 s: six of those follow each of the others."""
    now, spent = 0.0, {"light": 0.0, "all": 0.0}
    share = FairShare(16, clock=lambda: now)
    turns = []
    for _ in range(22):
        clients = share.next(["a"] * 3 + ["b"] * 2 + ["c"])
        turns.append("light" if "a" not in clients else "all")
        with share.measure():
            now += (seconds := {"light": 1, "all": 6}[turns[-1]])
            spent[turns[-1]] += seconds
        assert clients >= {"b", "c"} and share.is_shared
    assert turns[:9] == ["light", "all", *["light"] * 6, "all"] and spent["light"] >= spent["all"]


def test_nobody_steps_alone_without_light_and_heavy_clients():
    share = FairShare(16, clock=count().__next__)
    for clients in (["a"] * 9, ["a"] * 2 + ["b"], ["a"] * 3 + ["b"] * 3):
        for _ in range(3):
            assert share.next(clients) == set(clients) and not share.is_shared
            with share.measure():
                pass


def test_a_light_client_that_comes_last_ends_first_and_every_answer_is_that_of_its_prompt_alone(tiny_model):
    model, prompts = tiny_model(), {key: torch.arange(4, 9) + key for key in range(12)}
    batch, ended, output = ContinuousBatch(model, max_num_seqs=16), [], {key: [] for key in prompts}

    def step():
        for token in batch.step():
            output[token.key].append(token.token_id)
            ended.extend([token.key] * bool(token.finished))

    for key, ids in prompts.items():
        if key == 11:
            step()
        batch.add(key, ids, max_new_tokens=20, client="light" if key == 11 else "heavy")
    while batch.waiting or batch.running:
        step()
    assert ended[0] == 11 and sorted(ended) == list(prompts)
    assert output == {key: model.generate(ids[None], max_new_tokens=20)[0].tolist() for key, ids in prompts.items()}
