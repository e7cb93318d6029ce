"""`nanovlm export`."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from models.checkpoint import save_checkpoint
from nanovlm import SAMPLE
from nanovlm.cli import main as cli
from nanovlm.image_processing import load_image
from support.smolvlm import assert_same_logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_writes_a_folder_and_notes_what_does_not_map(tmp_path, tiled, capsys, dtype):
    model, processor = tiled
    save_checkpoint(tmp_path / "model", model, processor.tokenizer.to_json())
    assert cli.main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--dtype", dtype]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("note: ") == err.count("\n") == 3
    assert "one image of 16 x 16, as it has no layout for this model's tiles" in err and "<|global_image|>" in err
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{dtype}"}

    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    inputs = processor([[load_image(SAMPLE)]], ["Which tile?"])  # as the first note says: our ids and tiles
    assert len(inputs["images"]) > 1
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert_same_logits(model, theirs, inputs["input_ids"], inputs["images"], tolerance)


def test_unsupported_config_is_one_error_line(tmp_path, tiled, capsys):
    model, processor = tiled
    save_checkpoint(tmp_path / "model", model, processor.tokenizer.to_json())
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lm_attn_scaling": 1.5}))
    assert cli.main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    _, err = capsys.readouterr()
    assert "lm_attn_scaling=1.5" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv", [["nowhere/at-all/x", "--out", "x"], [str(SAMPLE), "--out", "x"]])
def test_missing_model_is_one_error_line(argv, capsys):
    assert cli.main(["export", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1
