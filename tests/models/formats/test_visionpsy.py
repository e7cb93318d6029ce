"""VisionPsy's resize rules, by worked examples, its config, and its folders beside nanoVLM's of the same model."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from models.checkpoint import load_config, save_checkpoint
from models.errors import CheckpointError
from models.formats.visionpsy import VisionPsy
from nanovlm import SAMPLE, Captioner
from nanovlm.cli.main import main
from nanovlm.processing.layouts.nanovlm import resized_size
from nanovlm.processing.layouts.visionpsy import flash_size
from support.checkpoints import assert_same_state

SIZES = {  # image -> Standard, Flash
    (256, 256): ((2048, 2048), (512, 512)), (640, 480): ((2048, 1536), (1024, 512)),
    (640, 488): ((2048, 2048), (1024, 512)), (1024, 768): ((2048, 1536), (1024, 1024)),
    (1200, 800): ((2048, 1536), (1536, 1024)), (3000, 1000): ((2048, 1024),) * 2, (300, 2000): ((512, 2048),) * 2,
    (5000, 100): ((2048, 512),) * 2, (1920, 1080): ((2048, 1536),) * 2, (512, 511): ((2048, 2048), (1024, 512)),
    (513, 512): ((2048, 2048), (1024, 1024)), (1092, 1092): ((2048, 2048), (1536, 2048)),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    assert (resized_size(*size, 512, 2048, True), flash_size(*size, 512, 2048, 512)) == SIZES[size]


PSY = {  # keys that the packager adds; of Flash the smallest side, 512 pixels, would be too large for these tiles
    "model_type": "visionpsynano", "is_flash": False, "resize_to_max_side_len": False, "resize_min_side_len": 16,
    "inference_max_img_size": None, "compile_inference": False, "eos_check_interval": 16, "vlm_checkpoint_path": None,
    "architectures": ["VisionPsyNanoForConditionalGeneration"], "auto_map": {}, "transformers_version": "5.0.0",
}  # fmt: skip


@pytest.fixture(params=["joined", "separate"])
def folder(request, tiled, tmp_path):
    """A random model in VisionPsy's layout: both of head and embedding, buffers, and ids in another order."""
    model, processor = tiled
    save_checkpoint(tmp_path / "plain", model, processor.tokenizer.to_json())
    shutil.copytree(tmp_path / "plain", tmp_path / "psy")
    state = load_file(tmp_path / "plain/model.safetensors")
    if request.param == "joined":
        state = VisionPsy.to_stored(state)
        assert any("gate_up_proj" in name for name in state) and not any("gate_proj" in name for name in state)
    state["decoder.token_embedding.weight"] = state["decoder.head.weight"].clone()
    state["decoder.rotary_embd.inv_freq"] = torch.ones(4)
    save_file(state, tmp_path / "psy/model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "psy/config.json").read_text())
    raw["vlm_extra_tokens"] = dict(sorted(raw["vlm_extra_tokens"].items()))
    (tmp_path / "psy/config.json").write_text(json.dumps(raw | PSY))
    return tmp_path / "psy"


def test_a_folder_is_read_as_ours_saved_as_ours_exported_as_ours_and_quantized(folder, tmp_path):
    psy, plain = (Captioner.from_pretrained(path, "cpu", "float32") for path in (folder, tmp_path / "plain"))
    assert psy.tokenizer.image_token_id == plain.tokenizer.image_token_id
    assert_same_state(psy.model, plain.model)
    psy.save_pretrained(tmp_path / "again")
    again = Captioner.from_pretrained(tmp_path / "again", "cpu", "float32")
    for size in ((10, 10), (20, 15), (40, 70), (90, 12)):
        image = Image.effect_noise(size, 90).convert("RGB")
        (ids, tiles), (other_ids, other_tiles) = psy.prepare(image), again.prepare(image)
        assert ids == other_ids and torch.equal(torch.cat(tiles), torch.cat(other_tiles)), size
        assert psy.caption(image, max_new_tokens=4) == again.caption(image, max_new_tokens=4)
    assert main(["export", str(folder), "--out", str(tmp_path / "exported")]) == 0
    exported = Captioner.from_pretrained(tmp_path / "exported", "cpu", "float32").model.decoder
    assert torch.equal(exported.blocks[0].mlp.gate_proj.weight, psy.model.decoder.blocks[0].mlp.gate_proj.weight)
    assert isinstance(Captioner.from_pretrained(folder, "cpu", quantize="int8").caption(SAMPLE, max_new_tokens=2), str)
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
