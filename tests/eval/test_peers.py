"""eval.peers compares like with like: the same weights, the same prompt, the same ids in float32."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch

from eval import peers
from eval.lib.hardware import matmul_flops, memory_bandwidth
from eval.lib.shapes import SHAPES

SMALL = {
    "lm_hidden_dim": 64, "lm_inter_dim": 96, "lm_n_blocks": 2, "lm_n_heads": 4, "lm_n_kv_heads": 2,
    "lm_vocab_size": 2048, "vit_hidden_dim": 16, "vit_inter_dim": 16, "vit_n_blocks": 1, "vit_n_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "230M", (replace(SHAPES["230M"][0], **SMALL), 0))
    monkeypatch.setattr(peers, "memory_bandwidth", lambda: 1e10)
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path))


def test_float32_says_the_same_everywhere(capsys):
    names = ["transformers float32", "ours float32", "ours bfloat16", "ours int8"]
    if importlib.util.find_spec("llama_cpp"):
        names.append("llama.cpp F32")
    assert peers.main([*names, "--tokens", "12", "--rounds", "1", "--json"]) == 0
    found = {result["name"]: result for result in json.loads(capsys.readouterr().out)["peers"]}
    assert set(found) == set(names) and all(len(result["ms"]) == 12 for result in found.values())
    reference = found.pop("transformers float32")["ids"]
    assert len({row[0] for row in reference}) > 1
    assert all(result["ids"] == reference for name, result in found.items() if "32" in name)


def test_several_sequences_at_once(capsys):
    assert peers.main(["ours float32", "--rows", "3", "--tokens", "4", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "15 of 15" in out and "1.00x" in out


def test_an_unknown_peer_is_named(capsys):
    with pytest.raises(SystemExit) as left:
        peers.main(["ours float8"])
    assert left.value.code == 2 and "'ours float8' is none of" in capsys.readouterr().err


def test_limits_are_plausible():
    assert 1e9 < memory_bandwidth(2**24) < 1e13 and 1e8 < matmul_flops(torch.float32, 256) < 1e15
