"""Every checkpoint format, a row each: read, saved and read again bit by bit, trained in, and exported.

tests/nanovlm/processing compares prompts and pixels; tests/models/formats has what only one format does.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from models import checkpoint
from models.checkpoint import format_of, load_config
from nanovlm import EMBEDDED, Captioner
from nanovlm.cli.main import main
from nanovlm.export.transformers import export_notes, export_smolvlm
from nanovlm.processing.convert import convert_layout
from support import ROOT, Package, noise_image
from support.backbones import FOLD, llama, siglip
from support.checkpoints import assert_same_state, write_visionpsy
from support.generation import inputs_of
from support.smolvlm import VARIANTS, write_folder

transformers = Package("transformers")
QUESTION = "What is this?"


def nanovlm(version):
    return lambda request, folder: shutil.copytree(request.getfixturevalue("make_checkpoint")(version), folder)


def visionpsy(joined):
    return lambda request, folder: write_visionpsy(folder, *request.getfixturevalue("tiled"), joined)


def converted(request, folder):
    """A model of nanoVLM's layout in SmolVLM's."""
    model, processor = request.getfixturevalue("tiled")
    Captioner(*convert_layout(model, processor.tokenizer)).save_pretrained(folder)


def backbones(layout):
    def write(request, folder):
        siglip().save_pretrained(folder / "siglip")
        llama(vocab_size=601, max_position_embeddings=1024).save_pretrained(folder / "llama")
        shutil.copy(EMBEDDED / "tokenizer.json", folder / "llama")
        joined = Captioner.from_backbones(folder / "siglip", folder / "llama", format=layout, **FOLD)
        joined.save_pretrained(folder)
        shutil.rmtree(folder / "llama")  # the backbones are not needed after

    return write


def smolvlm(name):
    return lambda request, folder: write_folder(folder, **VARIANTS[name])


FORMATS = {  # format: how a folder of it is written, here or by transformers
    **{f"nanoVLM, version {version}": nanovlm(version) for version in range(1, 6)},
    "embedded": lambda request, folder: shutil.copytree(EMBEDDED, folder),
    "VisionPsy": visionpsy(joined=True),
    "VisionPsy, gate and up apart": visionpsy(joined=False),
    "SmolVLM, converted": converted,
}
BY_TRANSFORMERS = {
    **{name: smolvlm(name) for name in VARIANTS},
    **{f"backbones in {layout}'s layout": backbones(layout) for layout in ("nanovlm", "smolvlm")},
}
ROWS = [*FORMATS, *(pytest.param(name, marks=pytest.mark.full) for name in BY_TRANSFORMERS)]


def test_every_registered_format_has_rows_and_is_in_the_docs():
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8").lower()
    for name in {find().name for find in checkpoint.FORMATS.values()}:
        assert name in page and any(row.lower().startswith(name) for row in FORMATS), name


@pytest.fixture(scope="module", params=ROWS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("format") / "model"
    (FORMATS | BY_TRANSFORMERS)[request.param](request, folder)
    return folder


@pytest.fixture(scope="module")
def captioner(folder):
    return Captioner.from_pretrained(folder, "cpu", "float32")


def assert_same_settings(folder, written):
    """Check that the other files that transformers reads, beside config.json and tokenizer.json, did not change."""
    for name in format_of(load_config(folder)).other_files:
        old, new = (path.read_text() if path.exists() else "" for path in (folder / name, written / name))
        assert old == new, name


def test_saved_and_read_again_it_is_the_same_bit_by_bit(folder, captioner, tmp_path):
    captioner.save_pretrained(tmp_path)
    assert_same_settings(folder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "lm_tokenizer" in config:  # the folder needs no other
        (tmp_path / "config.json").write_text(json.dumps(config | {"lm_tokenizer": "nobody-here/no-such-model"}))
    again = Captioner.from_pretrained(tmp_path, "cpu", "float32")
    assert_same_state(again.model, captioner.model)
    assert again.tokenizer.to_json() == captioner.tokenizer.to_json()
    one, other = (vars(each.model.cfg) | {"lm_tokenizer": "", "format": None} for each in (captioner, again))
    assert one == other and again.model.cfg.format_version == captioner.model.cfg.format_version
    assert again.model.cfg.format_name == captioner.model.cfg.format_name
    if format_of(again.model.cfg).for_transformers:
        assert again.model.cfg == captioner.model.cfg and config["torch_dtype"] == "float32"
    assert again.model.image_token_id == captioner.model.image_token_id
    for size in ((10, 10), (20, 15), (40, 70), (90, 12)):
        images = [noise_image(*size)]
        one, other = (inputs_of(each, images, QUESTION) for each in (captioner, again))
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["images"], other["images"])
        answers = [each.caption(images[0], QUESTION, max_new_tokens=4) for each in (captioner, again)]
        assert answers[0] == answers[1]


def test_two_steps_of_training_keep_the_format(folder, captioner, tmp_path):
    (tmp_path / "data").mkdir()
    noise_image(16, 16).save(tmp_path / "data/0.png")
    (tmp_path / "data/0.txt").write_text("A star.")
    flags = ["--max-steps", "2", "--batch-size", "1", "--num-workers", "0", "--device", "cpu"]
    paths = {"--model": folder, "--data": tmp_path / "data", "--out": tmp_path / "out"}
    assert main(["train", *flags, *(str(word) for pair in paths.items() for word in pair)]) == 0
    before, after = load_config(folder), Captioner.from_pretrained(tmp_path / "out", "cpu", "float32").model
    assert (after.cfg.format_version, after.cfg.format_name) == (before.format_version, before.format_name)
    assert_same_settings(folder, tmp_path / "out")
    if before.lm_tokenizer and Path(before.lm_tokenizer).is_dir():
        assert after.cfg.lm_tokenizer == str(tmp_path / "out"), "where stock nanoVLM finds the tokenizer"
    assert not torch.equal(after.decoder.head.weight, captioner.model.decoder.head.weight)


@pytest.mark.full
@torch.no_grad()
def test_an_exported_folder_computes_the_same_in_transformers(captioner, tmp_path):
    """nanoVLM's version 1 has no image token: the image's embeddings come first."""
    cfg = captioner.model.cfg
    export_smolvlm(captioner, tmp_path)
    has_processor = format_of(cfg).for_transformers or cfg.format_version == 5
    assert bool([*tmp_path.glob("*processor*")]) == has_processor
    assert has_processor == (not any(note.startswith("no processor") for note in export_notes(cfg)))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert theirs.dtype == captioner.model.dtype
    ids, images = inputs_of(captioner, [noise_image(20, 15)], QUESTION).values()
    pixels = (images * 2 - 1 if format_of(cfg).unit_pixels else images)[None]
    mask = torch.ones_like(pixels[:, :, 0], dtype=torch.bool)
    arguments = {"input_ids": ids, "pixel_values": pixels, "pixel_attention_mask": mask}
    if cfg.format_version == 1 and format_of(cfg).unit_pixels:
        text = theirs.get_input_embeddings()(ids[:, cfg.mp_image_token_length :])
        features = torch.cat(list(theirs.model.get_image_features(pixels, mask).pooler_output))[None]
        arguments = {"inputs_embeds": torch.cat([features, text], dim=1)}
    ours, _ = captioner.model(ids, images)
    assert (ours - theirs(**arguments).logits).abs().max() <= 1e-5 * ours.abs().max()
    assert theirs.generation_config.eos_token_id in (*captioner.tokenizer.eos_token_ids, None)
