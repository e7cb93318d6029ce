"""VisionPsy's resize rules, by worked examples, its config and its weights; and limits of SmolVLM's settings."""

import json
from dataclasses import replace

import pytest
import torch

from models.checkpoint import load_config
from models.common.errors import CheckpointError, InputError
from models.formats.smolvlm import SmolVLM
from models.formats.to_smolvlm import smolvlm_config
from models.formats.visionpsy import VisionPsy
from nanovlm import SAMPLE, Captioner
from nanovlm.processing.layouts.visionpsy import flash_size
from support import Package
from support.checkpoints import PSY, assert_same_state, write_visionpsy

transformers = Package("transformers")

FLASH_SIZES = {
    (256, 256): (512, 512), (640, 480): (1024, 512), (640, 488): (1024, 512), (1024, 768): (1024, 1024),
    (1200, 800): (1536, 1024), (3000, 1000): (2048, 1024), (300, 2000): (512, 2048), (5000, 100): (2048, 512),
    (1920, 1080): (2048, 1536), (512, 511): (1024, 512), (513, 512): (1024, 1024), (1092, 1092): (1536, 2048),
}  # fmt: skip


@pytest.mark.parametrize("size", FLASH_SIZES)
def test_flash_enlarges_small_images_only(size):
    assert flash_size(*size, 512, 2048, 512) == FLASH_SIZES[size]


@pytest.mark.parametrize("joined", [True, False])
def test_a_folder_is_read_as_ours_of_the_same_weights_and_quantized(tiled, tmp_path, joined):
    model, processor = tiled
    write_visionpsy(folder := tmp_path / "psy", model, processor, joined)
    psy = Captioner.from_pretrained(folder, "cpu", "float32")
    assert psy.tokenizer.image_token_id == model.image_token_id
    assert_same_state(psy.model, model)
    assert isinstance(Captioner.from_pretrained(folder, "cpu", quantize="int8").caption(SAMPLE, max_new_tokens=2), str)
    n = len(psy.tokenizer)
    foreign = {"lm_base_vocab_size": n, "lm_vocab_size": n + 1, "vlm_extra_tokens": {"image_token": "<new>"}}
    with pytest.raises(CheckpointError, match="the tokenizer has no such token"):
        VisionPsy().find_image_token_id(folder, replace(psy.model.cfg, **foreign, extra_token_amount=1))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, which this format needs"):
        VisionPsy().find_image_token_id(folder, psy.model.cfg)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"is_flash": True, "variant": "nano"}, (False, 512)),
        ({"is_flash": None, "variant": "nano-flash"}, (False, 512)),
        ({"is_flash": None, "variant": "plain", "resize_to_max_side_len": None}, (True, None)),
        ({"is_flash": None, "resize_to_max_side_len": False}, (False, 512)),
        ({"is_flash": True, "resize_min_side_len": 1024}, (False, 1024)),
        ({"resize_to_max_side_len": None}, (True, None)),
        ({}, (False, 16)),
        ({"inference_max_img_size": 1024}, (False, 16)),
        ({"is_flash": None, "variant": "x"}, "variant='x' is none of"),
        ({"is_flash": "no"}, "is_flash='no' is neither"),
        ({"resize_min_side_len": 0}, "resize_min_side_len=0 is no number of pixels"),
        ({"resize_min_side_len": 4096}, "resize_min_side_len=4096 is more than the longest side of 2048"),
        ({"text_config": {}, "lm_hidden_dim": None}, "MLX repack"),
    ],
)
def test_what_decides_the_resize_rule(tmp_path, tiny_config, changes, rule):
    raw = tiny_config(max_img_size=2048).to_dict() | PSY | changes
    raw = {key: value for key, value in raw.items() if not (key == "lm_hidden_dim" and value is None)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if isinstance(rule, str):
        with pytest.raises(CheckpointError, match=rule):
            load_config(tmp_path)
        return
    cfg = load_config(tmp_path)
    assert (cfg.resize_to_max_side_len, cfg.format.min_side) == rule
    assert cfg.max_img_size == (changes.get("inference_max_img_size") or 2048)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    again = load_config(tmp_path)
    assert (again.resize_to_max_side_len, getattr(again.format, "min_side", None)) == rule


def test_what_smolvlm_cannot_express_is_refused(tiny_config):
    side = {"vit_img_size": 76, "max_img_size": 76, "mp_pixel_shuffle_factor": 1, "mp_image_token_length": 361}
    with pytest.raises(InputError, match=r"19 patches a side \(vit_img_size=76 / vit_patch_size=4\)"):
        smolvlm_config(tiny_config(**side), 3, 2)
    with pytest.raises(InputError, match="lm_attn_scaling=1.5: SmolVLM's attention has no such factor"):
        smolvlm_config(tiny_config(lm_attn_scaling=1.5), 3, 2)
    cfg = tiny_config(vlm_extra_tokens=None)
    assert cfg.format_version == 1 and smolvlm_config(cfg, -1, 2)["image_token_id"] == cfg.lm_vocab_size


@pytest.mark.full
@pytest.mark.parametrize("grid", [12, 14, 16, 19, 24, 25, 27, 32])
def test_folded_grids_match_transformers_code(grid):
    config = transformers.SmolVLMVisionConfig(image_size=grid, patch_size=1, hidden_size=1)
    embeddings = transformers.models.smolvlm.modeling_smolvlm.SmolVLMVisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(grid**2)[:, None])
        positions = embeddings(torch.zeros(1, 3, grid, grid), torch.ones(1, grid, grid, dtype=torch.bool)).flatten()
    assert (positions.tolist() == list(range(grid**2))) == (SmolVLM.patch_positions(grid) == list(range(grid)))
