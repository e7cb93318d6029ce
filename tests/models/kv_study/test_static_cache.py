"""Static caches match the models; so do their exported graphs, saved and loaded, which do not branch on data."""

import io
from itertools import count

import pytest
import torch

from models.decoding import TokenSampler, generate_tokens
from models.kv_study.static_cache import LanguageModelStep, static_cache
from models.kv_study.static_export import export_language_model, export_text_decoder

CAPACITY = 24


def save_and_load(programs):
    modules = {}
    for name, program in programs.items():
        torch.export.save(program, file := io.BytesIO())
        file.seek(0)
        modules[name] = torch.export.load(file).module()
    return modules


def generate(run, prompt, max_new_tokens):
    """Ids after a prompt, read in two chunks; run(name, x, start) is a program's logits of x at position start."""
    run("prefill", prompt[:, :-2], torch.tensor(0))
    positions, logits = count(prompt.size(1)), run("prefill", prompt[:, -2:], torch.tensor(prompt.size(1) - 2))
    step = lambda ids: run("decode", ids[:, None], torch.tensor(next(positions)))  # noqa: E731
    return torch.stack(list(generate_tokens(logits, step, TokenSampler(), max_new_tokens)), 1)


@pytest.fixture(scope="module")
def programs(tiny_model):
    return export_language_model(tiny_model(seed=5).decoder, CAPACITY)


@pytest.fixture(scope="module")
def text_programs(encoder_decoder):
    return export_text_decoder(encoder_decoder.decoder, CAPACITY)


@pytest.mark.parametrize("kind", ["modules", pytest.param("exported", marks=pytest.mark.full)])
def test_language_model_steps_generate_the_same_ids(tiny_model, request, kind):
    model = tiny_model(seed=5)
    steps = dict.fromkeys(("prefill", "decode"), LanguageModelStep(model.decoder))
    if kind == "exported":
        steps = save_and_load(request.getfixturevalue("programs"))
    for batch, padding in ((1, 0), (5, 2)):
        images, ids = torch.rand(batch, 3, 16, 16), torch.randint(4, 40, (batch, 9))
        ids[:, 3:7] = 3
        mask = torch.ones(batch, CAPACITY, dtype=torch.long)
        ids[0, :padding], mask[0, :padding] = 0, 0
        expected = model.generate(ids, images, mask[:, :9], max_new_tokens=12)
        cache, x = static_cache(model.decoder, batch, CAPACITY), model.embed(ids, images)
        for _ in range(2):  # the second run must ignore what the first left in the cache
            found = generate(lambda name, x, start, mask=mask, cache=cache: steps[name](x, mask, start, cache), x, 12)
            assert torch.equal(found, expected)


@pytest.mark.full
def test_graphs_do_not_branch_on_data_and_write_the_cache_in_place(programs, text_programs):
    calls = [
        " ".join(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        for program in (*programs.values(), *text_programs.values())
    ]
    for name in ("aten.item", "_local_scalar_dense", "nonzero", "higher_order.cond"):
        assert not any(name in targets for targets in calls)
    assert all("index_copy_" in targets for targets in calls[: len(programs)])


@pytest.mark.full
@pytest.mark.parametrize(("batch", "patches"), [(1, 16), (2, 1), (5, 100)])
def test_exported_text_decoder_generates_the_same_ids(encoder_decoder, text_programs, batch, patches):
    decoder, module = encoder_decoder.decoder, save_and_load(text_programs)
    xa, whole = torch.randn(batch, patches, 24), torch.randint(0, 40, (batch, 4))
    cache, cross_kv = static_cache(decoder, batch, CAPACITY), module["cross"](xa)
    output = generate(lambda name, ids, start: module[name](ids, start, cross_kv, cache), whole, 10)
    for _ in range(10):
        whole = torch.cat([whole, decoder(whole, xa)[:, -1:].argmax(-1)], 1)
    assert torch.equal(output, whole[:, 4:])
