"""Static caches match the models; so do their exported graphs, saved and loaded, which do not branch on data."""

import io
import re
from itertools import count

import pytest
import torch

from models.decoding import TokenSampler, generate_tokens
from models.kv_study.static_cache import LanguageModelStep, language_model_cache
from models.kv_study.static_export import export_language_model

CAPACITY = 24


def exported(decoder):
    """Steps whose graphs were saved and loaded; they do not branch on data, and write the cache in place."""
    modules = {}
    for name, program in export_language_model(decoder, CAPACITY).items():
        calls = " ".join(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        assert not re.search(r"aten\.item|_local_scalar_dense|nonzero|higher_order\.cond", calls)
        assert "index_copy_" in calls
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


@pytest.mark.parametrize("kind", ["modules", pytest.param("exported", marks=pytest.mark.full)])
def test_language_model_steps_generate_the_same_ids(tiny_model, kind):
    model = tiny_model(seed=5)
    steps = dict.fromkeys(("prefill", "decode"), LanguageModelStep(model.decoder))
    if kind == "exported":
        steps = exported(model.decoder)
    for batch, padding in ((1, 0), (5, 2)):
        images, ids = torch.rand(batch, 3, 16, 16), torch.randint(4, 40, (batch, 9))
        ids[:, 3:7] = 3
        mask = torch.ones(batch, CAPACITY, dtype=torch.long)
        ids[0, :padding], mask[0, :padding] = 0, 0
        expected = model.generate(ids, images, mask[:, :9], max_new_tokens=12)
        cache, x = language_model_cache(model.decoder, batch, CAPACITY), model.embed(ids, images)
        for _ in range(2):  # the second run must ignore what the first left in the cache
            found = generate(lambda name, x, start, mask=mask, cache=cache: steps[name](x, mask, start, cache), x, 12)
            assert torch.equal(found, expected)
