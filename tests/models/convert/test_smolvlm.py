"""What `nanovlm export` writes is the same model to transformers: same logits, same ids, same words."""

import json

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers.models.smolvlm import processing_smolvlm

from models.checkpoint import save_checkpoint
from models.convert.smolvlm import patches_keep_their_positions, smolvlm_config, smolvlm_tensors
from nanovlm import EMBEDDED, PROMPT, SAMPLE, Captioner
from nanovlm.cli import main as cli
from nanovlm.export import chat_template, export_smolvlm

PARTS = [{"type": "image"}, {"type": "text", "text": PROMPT}]


@pytest.fixture(autouse=True)
def no_video(monkeypatch):
    """SmolVLM's processor will not load without num2words, which it needs for videos only."""
    monkeypatch.setattr(processing_smolvlm, "num2words", str)


@pytest.fixture(scope="module")
def embedded() -> Captioner:
    return Captioner.from_pretrained(EMBEDDED, "cpu", "float32")


@pytest.fixture(scope="module")
def folder(embedded, tmp_path_factory):
    """The embedded model, exported."""
    export_smolvlm(embedded, folder := tmp_path_factory.mktemp("export") / "smolvlm")
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def picture(width=130, height=90, seed=0):
    return Image.effect_noise((width, height), 90).convert("RGB") if seed else Image.open(SAMPLE).convert("RGB")


@torch.no_grad()
def assert_same_logits(model, theirs, ids, images, tolerance=1e-5):
    """Ours on pixels in [0, 1], theirs on [-1, 1]; to a part of the largest logit."""
    ours, _ = model(ids, images)
    shown = (images * 2 - 1)[None]
    said = theirs(input_ids=ids, pixel_values=shown, pixel_attention_mask=torch.ones_like(shown[:, :, 0])).logits
    assert (ours - said).abs().max() <= tolerance * ours.abs().max()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["SmolVLM", "Idefics3"])
def test_both_of_transformers_models_compute_the_same(tmp_path, tiny_model, tied, kind):
    model = tiny_model(lm_tie_weights=tied)
    config = smolvlm_config(model.cfg, image_token_id=3, eos_token_id=2)
    if kind == "Idefics3":
        config |= {"model_type": "idefics3", "vision_config": config["vision_config"] | {"model_type": None}}
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**config))
    result = theirs.load_state_dict(smolvlm_tensors(model), strict=False)
    assert result.unexpected_keys == [] and result.missing_keys == (["lm_head.weight"] if tied else [])
    theirs.tie_weights()
    ids = torch.randint(4, 40, (1, 20))
    ids[0, 2:6] = ids[0, 9:13] = 3
    assert_same_logits(model, theirs.eval(), ids, torch.rand(2, 3, 16, 16))


def test_transformers_loads_every_tensor_and_no_other(folder, embedded):
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    n_parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert n_parameters == sum(parameter.numel() for parameter in embedded.model.parameters())


def test_the_embedded_model_says_the_same_there(folder, theirs, embedded):
    inputs = embedded.processor([[picture()]], [PROMPT])
    assert_same_logits(embedded.model, theirs, inputs["input_ids"], inputs["images"])
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": PARTS}], add_generation_prompt=True)
    theirs_inputs = processor(text=text, images=[picture()], return_tensors="pt")
    new = theirs.generate(**theirs_inputs, max_new_tokens=64)[:, theirs_inputs["input_ids"].size(1) :]
    assert processor.batch_decode(new, skip_special_tokens=True) == [embedded.caption(SAMPLE)]


@pytest.mark.parametrize("n_pictures", [0, 1, 2, 3])
def test_their_processor_reads_as_ours(folder, embedded, n_pictures):
    pictures = [picture(130 + 7 * i, 90, seed=i) for i in range(n_pictures)]
    content = [{"type": "image"}] * n_pictures + [{"type": "text", "text": "What is on the left?"}]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    theirs = processor(text=text, images=pictures or None, return_tensors="pt")
    ours = embedded.processor([pictures], ["What is on the left?"])
    assert torch.equal(theirs["input_ids"], ours["input_ids"])
    if pictures:  # both resize 8-bit pictures, and may round a value to either side
        assert ((theirs["pixel_values"][0] + 1) / 2 - ours["images"]).abs().max() <= 1.01 / 255


def test_a_black_picture_is_a_picture(theirs, embedded):
    """With pixels in [0, 1] it would be all 0, which they take for padding."""
    inputs = embedded.processor([[Image.new("RGB", (96, 96))]], [PROMPT])
    assert inputs["images"].abs().max() == 0
    assert_same_logits(embedded.model, theirs, inputs["input_ids"], inputs["images"])


def test_contents_may_be_strings_or_parts_and_images_come_first(folder, embedded):
    processor = transformers.AutoProcessor.from_pretrained(folder)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS[::-1]}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n<|image|>{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat_template(embedded.model.cfg).endswith(embedded.model.cfg.lm_chat_template)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_verb_writes_a_folder_and_says_what_does_not_map(tmp_path, tiled, capsys, dtype):
    model, processor = tiled
    save_checkpoint(tmp_path / "model", model, processor.tokenizer.to_json())
    assert cli.main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--dtype", dtype]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("note: ") == err.count("\n") == 3
    assert "one image of 16 x 16, as it has no layout for this model's tiles" in err and "<|global_image|>" in err
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{dtype}"}

    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    inputs = processor([[picture()]], ["Which tile?"])  # the way that the note tells: our ids, our tiles
    assert len(inputs["images"]) > 1
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert_same_logits(model, theirs, inputs["input_ids"], inputs["images"], tolerance)


def test_what_smolvlm_can_not_compute_is_refused_in_one_line(tmp_path, tiled, capsys):
    model, processor = tiled
    save_checkpoint(tmp_path / "model", model, processor.tokenizer.to_json())
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lm_attn_scaling": 1.5}))
    assert cli.main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    _, err = capsys.readouterr()
    assert "lm_attn_scaling=1.5" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_model_of_an_earlier_era_is_refused(tiny_config):
    tokens = {"image_token": "<|image|>"}
    with pytest.raises(ValueError, match=r"a model of format 4, before September 2025"):
        smolvlm_config(tiny_config(vlm_extra_tokens=tokens, extra_token_amount=1), 3, 2)


def test_a_grid_that_their_rounding_would_fold_is_refused(tiny_config):
    side = {"vit_img_size": 76, "max_img_size": 76, "mp_pixel_shuffle_factor": 1, "mp_image_token_length": 361}
    with pytest.raises(ValueError, match=r"19 patches a side \(vit_img_size=76 / vit_patch_size=4\)"):
        smolvlm_config(tiny_config(**side), 3, 2)


@pytest.mark.parametrize("grid", [12, 14, 16, 19, 24, 25, 27, 32])
def test_which_grids_fold_is_known_from_their_own_code(grid):
    config = transformers.SmolVLMVisionConfig(image_size=grid, patch_size=1, hidden_size=1)
    embeddings = transformers.models.smolvlm.modeling_smolvlm.SmolVLMVisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(grid**2)[:, None])
        places = embeddings(torch.zeros(1, 3, grid, grid), torch.ones(1, grid, grid, dtype=torch.bool)).flatten()
    assert (places.tolist() == list(range(grid**2))) == patches_keep_their_positions(grid)


@pytest.mark.parametrize("argv", [["nowhere/at-all/x", "--out", "x"], [str(SAMPLE), "--out", "x"]])
def test_a_model_that_is_not_there_is_one_line(argv, capsys):
    assert cli.main(["export", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1
