"""Exported graphs with fixed caches say what the models say, after a trip to disk, and branch on no data."""

import io

import pytest
import torch

from models.decoding import SamplingParams
from models.kv_study.static_cache import (
    export_language_model,
    export_text_decoder,
    language_model_cache,
    stream,
    text_decoder_cache,
)

CAPACITY = 24


def reloaded(programs):
    """The programs as another process would have them."""
    modules = {}
    for name, program in programs.items():
        torch.export.save(program, file := io.BytesIO())
        file.seek(0)
        modules[name] = torch.export.load(file).module()
    return modules


def targets(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def reads(program):
    """What in the graph would look at a tensor's values, or choose by them."""
    words = ("aten.item", "_local_scalar_dense", "nonzero", "higher_order.cond")
    return [target for target in targets(program) if any(word in target for word in words)]


@pytest.fixture(scope="module")
def language_model(tiny_model):
    """A model, its exported programs for two rows, and the same programs reloaded."""
    model = tiny_model(seed=5)
    programs = export_language_model(model.decoder, CAPACITY, batch=2)
    return model, programs, reloaded(programs)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_exported_language_model_says_the_same_ids(language_model, sampling, padding):
    model, _, module = language_model
    images = torch.rand(2, 3, 16, 16)
    ids = torch.randint(4, 40, (2, 9))
    ids[:, 3:7] = 3
    mask = torch.ones(2, CAPACITY, dtype=torch.long)
    ids[0, :padding], mask[0, :padding] = 0, 0
    wanted = model.generate(ids, images, mask[:, :9], max_new_tokens=12, sampling=sampling)

    cache = language_model_cache(model.decoder, 2, CAPACITY)
    with torch.no_grad():
        x = model.embed(ids, images)
    for _ in range(2):  # what an earlier sequence left in the cache is not seen
        said = stream(
            lambda x, start: module["prefill"](x, mask, start, cache),
            lambda x, start: module["decode"](x, mask, start, cache),
            x,
            sampling=sampling,
            max_new_tokens=12,
        )
        assert torch.equal(torch.stack(list(said), 1), wanted)


def test_a_prefill_of_any_length_and_in_chunks_is_one_reading(language_model):
    """To 1e-5, against the whole in one pass of the model itself."""
    model, _, module = language_model
    x = torch.randn(2, 11, 24)
    mask, cache = torch.ones(2, CAPACITY, dtype=torch.long), language_model_cache(model.decoder, 2, CAPACITY)
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 6), (6, 11)):
            logits = module["prefill"](x[:, start:stop], mask, torch.tensor(start), cache)
            whole = model.decoder.head(model.decoder(x[:, :stop])[0][:, -1])
            torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_no_branch_is_left_that_depends_on_data(language_model, name):
    """Nothing in the graph reads a tensor's value into Python; the caches alone are written to, in place."""
    program = language_model[1][name]
    assert not reads(program)
    assert any("index_copy_" in target for target in targets(program))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_exported_text_decoder_says_the_same_ids(encoder_decoder, rows):
    """Its cross keys and values come from a graph of their own, once per picture."""
    images, ids = torch.rand(rows, 3, 16, 16), torch.randint(0, 40, (rows, 4))
    wanted = encoder_decoder.generate(ids, images, max_new_tokens=10)
    programs = export_text_decoder(encoder_decoder.decoder, n_patches=16, capacity=CAPACITY, batch=rows)
    assert not any(reads(program) for program in programs.values())
    module, cache = reloaded(programs), text_decoder_cache(encoder_decoder.decoder, rows, CAPACITY)
    with torch.no_grad():
        cross = module["cross"](encoder_decoder.encode(images))
    said = stream(
        lambda ids, start: module["prefill"](ids, start, cross, cache),
        lambda ids, start: module["decode"](ids, start, cross, cache),
        ids,
        max_new_tokens=10,
    )
    assert torch.equal(torch.stack(list(said), 1), wanted)


def test_a_cache_larger_than_the_positions_is_refused(language_model, encoder_decoder):
    with pytest.raises(ValueError, match=r"capacity=65 exceeds lm_max_position_embeddings=64"):
        language_model_cache(language_model[0].decoder, 1, 65)
    with pytest.raises(ValueError, match=r"capacity=65 exceeds the decoder's n_ctx=64"):
        text_decoder_cache(encoder_decoder.decoder, 1, 65)
