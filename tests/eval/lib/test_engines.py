"""Engines with the same weights decode the same tokens in float32, alone and in a batch."""

import importlib.util
import sys

import pytest
import torch

from eval.latency import greedy_ids
from eval.lib.engines import EngineOptions, NanoVLMEngine, make_engines
from eval.lib.gguf_writer import GGUF_TYPES, gguf_tensors, write_gguf
from eval.lib.random_model import write_random_model
from nanovlm.errors import MissingExtraError

PROMPT = [5, 9, 11, 7, 60, 33]
LLAMA_CPP = bool(importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"))


@pytest.fixture(scope="module")
def folder(small_230m, tmp_path_factory):
    write_random_model(path := tmp_path_factory.mktemp("models") / "small", small_230m)
    return path


def make(folder, tmp_path, **options):
    return {engine.name: engine for engine in make_engines(folder, tmp_path, EngineOptions(**options))}


def test_every_configuration_is_an_engine(folder, tmp_path):
    options = {"dtypes": ["float32", "bfloat16"], "quantize": "int8", "against": ["plain", "transformers"]}
    engines = make(folder, tmp_path, **options)
    assert {name: engine.weight_bytes for name, engine in engines.items()} == {
        "plain float32": 4, "transformers float32": 4, "transformers bfloat16": 2,
        "nanovlm float32": 4, "nanovlm float32 int8": 1, "nanovlm bfloat16": 2, "nanovlm bfloat16 int8": 1,
    }  # fmt: skip
    assert engines["nanovlm bfloat16 int8"].dtype == torch.bfloat16


@pytest.mark.parametrize("batch_size", [1, 3])
def test_float32_decodes_the_same_tokens_everywhere(folder, tmp_path, batch_size):
    against = ["plain", "transformers"] + (["llama.cpp"] if LLAMA_CPP else [])
    engines = make(folder, tmp_path, dtypes=["float32"], against=against, batch_size=batch_size)
    prompts = [[token + row for token in PROMPT] for row in range(batch_size)]
    ids = {name: greedy_ids(engine, prompts, 12) for name, engine in engines.items()}
    expected = ids["plain float32"]
    assert len(expected) == 13 and all(len(step) == batch_size for step in expected)
    assert len({step[0] for step in expected}) > 1, "not one token again and again"
    assert all(steps == expected for steps in ids.values())
    for engine in engines.values():
        assert greedy_ids(engine, prompts, 12) == expected, "a prefill starts anew"


def test_the_plain_engine_is_the_plain_model(folder, tmp_path):
    engines = make(folder, tmp_path, dtypes=["float32"])
    plain, fast = engines.values()
    assert plain.model is plain.captioner.model and fast.model is fast.captioner.inference
    image = torch.rand(1, 3, 512, 512)
    torch.testing.assert_close(plain.encode_image(image), fast.encode_image(image), rtol=1e-4, atol=1e-4)
    assert isinstance(plain, NanoVLMEngine) and plain.encode_image(image).shape == (1, 1, 64)


@pytest.mark.parametrize(("module", "engine"), [("transformers", "transformers"), ("llama_cpp", "llama.cpp")])
def test_a_missing_package_names_its_extra(folder, tmp_path, monkeypatch, module, engine):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"needs the extra peers: pip install \"nanovlm\[peers\]\""):
        make(folder, tmp_path, against=[engine])


def test_gguf_has_every_weight_once(folder, tmp_path):
    decoder = make(folder, tmp_path)["plain float32"].model.decoder
    tensors = gguf_tensors(decoder)
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in decoder.parameters())
    query = decoder.blocks[0].attn.q_proj.weight
    half = query.size(0) // decoder.cfg.lm_n_heads // 2
    assert torch.equal(tensors["blk.0.attn_q"][:2], query[[0, half]]), "llama.cpp rotates neighbors"


@pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="needs gguf")
@pytest.mark.parametrize("gguf_type", GGUF_TYPES)
def test_gguf_files_are_written(folder, tmp_path, gguf_type):
    write_gguf(make(folder, tmp_path)["plain float32"].model.decoder, path := tmp_path / "model.gguf", gguf_type)
    assert path.read_bytes()[:4] == b"GGUF"
