"""eval.roofline counts what a stage must read and do; theory says the same."""

import json
from dataclasses import replace

import pytest

from eval import roofline
from eval.lib.hardware import matmul_flops, memory_bandwidth
from eval.lib.shapes import SHAPES

SMALL = {
    "vit_img_size": 64, "vit_hidden_dim": 32, "vit_inter_dim": 48, "vit_n_heads": 2, "vit_n_blocks": 2,
    "lm_hidden_dim": 48, "lm_inter_dim": 64, "lm_n_heads": 6, "lm_n_kv_heads": 2, "lm_n_blocks": 2,
    "lm_vocab_size": 500, "mp_pixel_shuffle_factor": 2, "mp_image_token_length": 4,
}  # fmt: skip


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_bytes_and_operations_are_the_models(capsys, monkeypatch, tmp_path, dtype, size):
    monkeypatch.setitem(SHAPES, "230M", (replace(SHAPES["230M"][0], **SMALL), 0))
    monkeypatch.setenv("NANOVLM_CACHE", str(tmp_path))
    monkeypatch.setattr(roofline, "memory_bandwidth", lambda: memory_bandwidth(2**22))
    monkeypatch.setattr(roofline, "matmul_flops", lambda dtype: matmul_flops(dtype, 128))
    assert roofline.main(["--rounds", "1", "--dtype", dtype, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sees, reads, says = found["stages"]
    cfg = SHAPES["230M"][0]
    block = 48 * (48 + 2 * 16 + 48) + 3 * 48 * 64
    weights = 2 * (block + 2 * 48) + 48 + 500 * 48  # the head is the embedding
    assert reads["weight_bytes"] == says["weight_bytes"] == size * weights
    assert sees["weight_bytes"] > 0 and min(stage["seconds"] for stage in found["stages"]) > 0
    products = 2 * (2 * block * 20 + 500 * 48)  # two operations a weight and token; the head for the last
    assert products < reads["flops"] <= products + 2 * 2 * 4 * 20 * 20 * 48
    assert says["flops"] == pytest.approx(2 * (2 * block + 500 * 48) + 2 * 4 * 21 * 48)
    assert roofline.main(["--rounds", "1", "--dtype", dtype]) == 0
    assert "say one token" in capsys.readouterr().out and cfg.lm_n_blocks == 2


def test_wrong_rounds_are_refused(capsys):
    with pytest.raises(SystemExit) as left:
        roofline.main(["--rounds", "0"])
    assert left.value.code == 2 and "--rounds: 0" in capsys.readouterr().err
