"""The files beside the ONNX graphs fit them; test_docs.py captions the sample with the embedded model's graphs."""

import json
import sys

import numpy as np
import pytest

from nanovlm import Captioner
from nanovlm.errors import InputError, MissingExtraError
from nanovlm.export.onnx import check_onnx_extra, export_onnx
from nanovlm.export.transformers import export_smolvlm
from support import noise_image
from support.onnx import OnnxModel, onnxruntime_graphs
from support.smolvlm import write_folder

pytestmark = pytest.mark.full


def exported(folder, captioner) -> OnnxModel:
    return OnnxModel(onnxruntime_graphs(folder / "onnx"), captioner.model.cfg, captioner.model.image_token_id)


def transformers_js_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["transformers.js_config"]


def test_the_settings_that_transformers_js_reads_are_there(onnx_folder):
    expected = {"kv_cache_dtype": {"fp16": "float16"}, "use_external_data_format": {}}
    assert transformers_js_config(onnx_folder) == expected
    tokenizer_config = json.loads((onnx_folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == (onnx_folder / "chat_template.jinja").read_text()


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    """A random model written by transformers, its processor, and its graphs."""
    theirs, processor = write_folder(folder := tmp_path_factory.mktemp("smolvlm"))
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    export_smolvlm(captioner, out := folder / "out")
    export_onnx(captioner, out)
    return theirs, processor, exported(out, captioner), out


def test_a_smolvlm_gives_transformers_ids_for_its_processors_inputs(smolvlm):
    """Tiles, several images, and rows of different numbers of images, on pixels as transformers normalizes them."""
    theirs, processor, model, _ = smolvlm
    rows = [[noise_image(90, 40, seed=1)], [noise_image(60, 70, seed=2), noise_image(20, 20, seed=3)]]
    texts = ["<image>What is in it?", "<image><image>Which?"]
    inputs = processor(text=texts, images=rows, return_tensors="pt", padding=True)
    assert inputs["pixel_attention_mask"].any((2, 3)).sum(1).unique().numel() == 2  # one row has fewer tiles
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    expected = theirs.generate(**inputs, max_new_tokens=8, **options)
    images = {name: inputs[name].numpy() for name in ("pixel_values", "pixel_attention_mask")}
    images["pixel_attention_mask"] = images["pixel_attention_mask"] == 1
    ids, mask = inputs["input_ids"].numpy(), inputs["attention_mask"].numpy()
    got, logits = model.generate(ids, mask, images, 8)
    np.testing.assert_array_equal(got, expected.sequences[:, ids.shape[1] :].numpy())
    np.testing.assert_allclose(logits, np.stack([step.numpy() for step in expected.logits], 1), atol=1e-3, rtol=1e-4)


def test_transformers_js_and_the_other_readers_find_a_smolvlms_settings(smolvlm):
    """transformers 5 writes the image processor's settings to processor_config.json, and the template to a file."""
    _, processor, _, folder = smolvlm
    found = json.loads((folder / "preprocessor_config.json").read_text())
    assert found["processor_class"] == type(processor).__name__ and found["image_mean"] == [0.5, 0.5, 0.5]
    assert transformers_js_config(folder)["kv_cache_dtype"] == {"fp16": "float16"}
    assert Captioner.from_pretrained(folder, "cpu", "float32").model.cfg.format_name == "smolvlm"
    again = type(processor).from_pretrained(folder)
    assert again.chat_template == processor.chat_template == again.tokenizer.chat_template


def test_a_model_without_weights_to_export_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match="were released"):
        export_onnx(Captioner.from_pretrained(quantize="int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"ONNX files need onnxscript: pip install 'nanovlm\[onnx\]'"):
        check_onnx_extra()
