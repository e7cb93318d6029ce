"""VisionPsy's resize rules, by worked examples, and its config."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from models.checkpoint import load_config, save_checkpoint
from models.errors import CheckpointError
from models.formats.visionpsy import VisionPsy, is_flash
from nanovlm import SAMPLE, Captioner
from nanovlm.cli.main import main
from nanovlm.processing.layouts.nanovlm import resized_size
from nanovlm.processing.layouts.visionpsy import flash_size

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


def test_what_makes_a_model_flash():
    assert is_flash({"is_flash": True, "variant": "nano"}) and is_flash({"variant": "nano-flash"})
    assert is_flash({"resize_to_max_side_len": False}) and not is_flash({}) and not is_flash({"variant": "plain"})
    with pytest.raises(CheckpointError, match="variant='x'"):
        is_flash({"variant": "x"})
    with pytest.raises(CheckpointError, match="is_flash='no' is neither"):
        is_flash({"is_flash": "no"})


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


def test_a_folder_is_read_as_the_same_model_in_our_format(folder, tiled, tmp_path):
    psy = Captioner.from_pretrained(folder, "cpu", "float32")
    plain = Captioner.from_pretrained(tmp_path / "plain", "cpu", "float32")
    assert psy.tokenizer.image_token_id == plain.tokenizer.image_token_id
    assert all(torch.equal(a, b) for a, b in zip(psy.model.state_dict().values(), plain.model.state_dict().values()))


def test_a_saved_model_preprocesses_and_answers_alike(folder, tmp_path):
    psy = Captioner.from_pretrained(folder, "cpu", "float32")
    psy.save_pretrained(tmp_path / "again")
    again = Captioner.from_pretrained(tmp_path / "again", "cpu", "float32")
    for size in ((10, 10), (20, 15), (40, 70), (90, 12)):
        image = Image.effect_noise(size, 90).convert("RGB")
        (ids, tiles), (other_ids, other_tiles) = psy.prepare(image), again.prepare(image)
        assert ids == other_ids and torch.equal(torch.cat(tiles), torch.cat(other_tiles)), size
        assert psy.caption(image, max_new_tokens=4) == again.caption(image, max_new_tokens=4)


def test_it_quantizes_and_learns(folder, tmp_path):
    assert isinstance(Captioner.from_pretrained(folder, "cpu", quantize="int8").caption(SAMPLE, max_new_tokens=2), str)
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (20, 20)).save(data / "a.png")
    (data / "a.txt").write_text("Black.")
    flags = ["--max-steps", "1", "--batch-size", "1", "--num-workers", "0", "--device", "cpu"]
    assert main(["train", "--data", str(data), "--model", str(folder), "--out", str(tmp_path / "out"), *flags]) == 0
    flags = [*flags, "--lora-rank", "2"]
    assert main(["train", "--data", str(data), "--model", str(folder), "--out", str(tmp_path / "lora"), *flags]) == 0
    assert Captioner.from_pretrained(tmp_path / "out", "cpu").model.cfg.format_name in ("visionpsy", "nanovlm")


def test_repacks_for_mlx_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "visionpsynano", "text_config": {}}))
    with pytest.raises(CheckpointError, match="MLX repack"):
        load_config(tmp_path)


def test_it_is_exported_like_nanovlms(folder, tmp_path):
    assert main(["export", str(folder), "--out", str(tmp_path / "exported")]) == 0
    exported = Captioner.from_pretrained(tmp_path / "exported", "cpu", "float32")
    ours = Captioner.from_pretrained(folder, "cpu", "float32").model.state_dict()
    name = "decoder.blocks.0.mlp.gate_proj.weight"
    assert torch.equal(exported.model.state_dict()[name], ours[name])
