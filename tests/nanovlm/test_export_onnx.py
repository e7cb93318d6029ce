"""The embedded model's ONNX graphs caption pictures as the model does."""

import json
import sys

import numpy as np
import pytest

from nanovlm import EMBEDDED, PROMPT, SAMPLE, Captioner
from nanovlm.cli import main as cli
from nanovlm.errors import MissingExtraError
from nanovlm.export import check_onnx_extra
from nanovlm.image_processing import load_image
from support.onnx import OnnxModel, image_inputs, onnxruntime_graphs, openvino_graphs

PROMPTS = [PROMPT, "What is on the left?", "How many shapes are there?"]


@pytest.fixture(scope="module")
def embedded() -> Captioner:
    return Captioner.from_pretrained(EMBEDDED, "cpu", "float32")


@pytest.fixture(scope="module")
def pictures():
    sample = load_image(SAMPLE)
    return [sample, sample.rotate(90), sample.crop((10, 0, 150, 120))]


def exported(folder, captioner, suffix="", graphs=onnxruntime_graphs) -> OnnxModel:
    return OnnxModel(graphs(folder / "onnx", suffix), captioner.model.cfg, captioner.model.image_token_id)


def assert_same_answers(model: OnnxModel, captioner: Captioner, rows: list, prompts: list[str], n_tokens=30):
    batch = captioner.processor(rows, prompts)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = captioner.model.generate(ids, batch["images"], mask, max_new_tokens=n_tokens).numpy()
    images = image_inputs(batch["images"].numpy(), [len(row) for row in rows])
    got, _ = model.generate(ids.numpy(), mask.numpy(), images, n_tokens)
    end = captioner.tokenizer.eos_token_id
    for ours, theirs in zip(expected.tolist(), got.tolist()):
        length = ours.index(end) + 1 if end in ours else len(ours)
        assert theirs[:length] == ours[:length]


def test_each_picture_and_prompt_gives_the_same_ids(onnx_folder, embedded, pictures):
    model = exported(onnx_folder, embedded)
    for picture in pictures:
        for prompt in PROMPTS:
            assert_same_answers(model, embedded, [[picture]], [prompt])


def test_a_batch_of_different_lengths_and_numbers_of_pictures_gives_the_same_ids(onnx_folder, embedded, pictures):
    rows = [pictures[:1], pictures[:2], pictures[2:]]
    assert_same_answers(exported(onnx_folder, embedded), embedded, rows, PROMPTS)


def test_openvino_gives_the_same_ids(onnx_folder, embedded, pictures):
    pytest.importorskip("openvino")
    model = exported(onnx_folder, embedded, graphs=openvino_graphs)
    assert_same_answers(model, embedded, [pictures[:1], pictures[1:]], PROMPTS[:2])


def test_int8_captions_the_sample(onnx_folder, embedded, pictures):
    assert_same_answers(exported(onnx_folder, embedded, "_quantized"), embedded, [pictures[:1]], [PROMPT])


def test_the_processor_of_the_folder_fits_the_graphs(onnx_folder, embedded, pictures, monkeypatch):
    """transformers' processor normalises pixels; the vision encoder takes them as they are."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.models.smolvlm.processing_smolvlm, "num2words", str, raising=False)
    processor = transformers.AutoProcessor.from_pretrained(onnx_folder)
    inputs = processor(text="<|image|>", images=pictures[:1], return_tensors="np")
    pixels = {"pixel_values": inputs["pixel_values"], "pixel_attention_mask": inputs["pixel_attention_mask"] == 1}
    features = exported(onnx_folder, embedded).graphs["vision_encoder"](pixels)[0]
    model = embedded.model
    expected = model.MP(model.vision_encoder(embedded.processor([pictures[:1]], [PROMPT])["images"])).detach().numpy()
    assert np.abs(features - expected).max() < 0.05 * np.abs(expected).max()  # both resize 8-bit images
    wrong = exported(onnx_folder, embedded).graphs["vision_encoder"](
        pixels | {"pixel_values": inputs["pixel_values"] / 2}
    )
    assert np.abs(wrong[0] - expected).max() > 0.2 * np.abs(expected).max()


def test_config_says_what_transformers_js_needs(onnx_folder):
    config = json.loads((onnx_folder / "config.json").read_text())
    assert config["transformers.js_config"]["kv_cache_dtype"] == {"fp16": "float16"}


def test_onnx_dtype_without_onnx_is_one_error_line(tmp_path, capsys):
    assert cli.main(["export", str(EMBEDDED), "--out", str(tmp_path / "out"), "--onnx-dtype", "int8"]) == 2
    assert capsys.readouterr().err == "nanovlm export: --onnx-dtype needs --onnx\n"


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"ONNX files need onnxscript: pip install 'nanovlm\[onnx\]'"):
        check_onnx_extra()
