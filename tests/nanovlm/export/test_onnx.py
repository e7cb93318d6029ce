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
from support.onnx import NAMES, onnxruntime_graphs
from support.smolvlm import write_folder

pytestmark = pytest.mark.full


def transformers_js_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["transformers.js_config"]


def test_the_settings_that_transformers_js_reads_are_there(onnx_folder):
    expected = {"kv_cache_dtype": {"fp16": "float16"}, "use_external_data_format": {}}
    assert transformers_js_config(onnx_folder) == expected
    tokenizer_config = json.loads((onnx_folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == (onnx_folder / "chat_template.jinja").read_text()


def test_a_smolvlms_graphs_and_settings(tmp_path, monkeypatch):
    """Its encoder reads pixels as its processor normalizes them; weights beyond a file's limit lie beside it.

    transformers 5 writes the image processor's settings to processor_config.json, and the template to a file.
    """
    monkeypatch.setattr("nanovlm.export.onnx.MAX_FILE_BYTES", 512)
    _, processor = write_folder(tmp_path / "model")
    captioner = Captioner.from_pretrained(tmp_path / "model", "cpu", "float32")
    export_smolvlm(captioner, folder := tmp_path / "out")
    export_onnx(captioner, folder)
    found = json.loads((folder / "preprocessor_config.json").read_text())
    assert found["processor_class"] == type(processor).__name__ and found["image_mean"] == [0.5, 0.5, 0.5]
    assert Captioner.from_pretrained(folder, "cpu", "float32").model.cfg.format_name == "smolvlm"
    second_files = {f"{name}.onnx": 1 for name in NAMES}
    assert transformers_js_config(folder)["use_external_data_format"] == second_files
    assert {path.name for path in (folder / "onnx").glob("*_data")} == {f"{name}_data" for name in second_files}
    again = type(processor).from_pretrained(folder)
    assert again.chat_template == processor.chat_template == again.tokenizer.chat_template

    inputs = processor(text=["<image>a"], images=[[noise_image(90, 40)]], return_tensors="pt")
    pixels = inputs["pixel_values"]
    mask = np.ones((*pixels.shape[:2], *pixels.shape[3:]), bool)
    encode = onnxruntime_graphs(folder / "onnx")["vision_encoder"]
    features = encode({"pixel_values": pixels.numpy(), "pixel_attention_mask": mask})[0]
    np.testing.assert_allclose(features, captioner.model.encode_images(pixels[0]).detach().numpy(), atol=1e-4)


def test_a_model_without_weights_to_export_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match="were released"):
        export_onnx(Captioner.from_pretrained(quantize="int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"ONNX files need onnxscript: pip install 'nanovlm\[onnx\]'"):
        check_onnx_extra()
