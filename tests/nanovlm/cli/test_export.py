"""`nanovlm export`."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.common import files
from models.language_model import MLP
from models.lora.files import read_adapters
from nanovlm import EMBEDDED, PROMPT, SAMPLE, Captioner
from nanovlm.cli.export import MARKER
from nanovlm.processing.image_loading import load_image
from nanovlm.synthetic import draw, random_scene
from support import ROOT
from support.cli import assert_usage_error
from support.generation import inputs_of
from support.smolvlm import assert_same_logits, their_inputs, write_folder


@pytest.fixture
def export(run_script, tmp_path):
    return lambda model, *flags: run_script("export", "export", model, "--out", tmp_path / "out", *flags)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_writes_a_folder_and_notes_what_does_not_map(tmp_path, tiled, export, dtype):
    transformers = pytest.importorskip("transformers")
    captioner = Captioner(*tiled)
    captioner.save_pretrained(tmp_path / "model")
    code, out, err = export(tmp_path / "model", "--dtype", dtype)
    assert (code, out) == (0, "") and err.count("note: ") == err.count("\n") - 1 == 1
    assert err.endswith("out holds the exported model\n")
    assert "one image of 16 x 16 after <|global_image|>, without this model's tiles of up to 64" in err
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{dtype}"}
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    inputs = inputs_of(captioner, [load_image(SAMPLE)], "Which tile?")  # as the note says: our ids and tiles
    assert len(inputs["images"]) > 1
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert_same_logits(captioner.model, theirs, inputs["input_ids"], inputs["images"], tolerance)


@pytest.fixture
def run_lora(train, tmp_path):

    def run(base):
        (tmp_path / "data").mkdir()
        for i in range(2):
            draw(random_scene(random.Random(i))).save(tmp_path / "data" / f"{i}.png")
            (tmp_path / "data" / f"{i}.txt").write_text("A photograph of my cat.")
        flags = "--max-steps 8 --batch-size 2 --num-workers 0 --device cpu --lora-rank 4 --lr 5e-2"
        argv = ["--model", base, "--data", tmp_path / "data", "--out", tmp_path / "run"]
        assert train(*argv, *flags.split())[0] == 0
        return tmp_path / "run"

    return run


def their_model(folder, adapter=None):
    """Model that transformers loads from a folder, in float32, with PEFT's adapter of another one."""
    transformers, peft = map(pytest.importorskip, ("transformers", "peft"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)


@pytest.mark.full
@torch.no_grad()
def test_adapters_are_exported_beside_their_base_model(run_lora, export, tmp_path, model_folder):
    lora_run, out = run_lora(EMBEDDED), tmp_path / "out"
    unnamed = Path(shutil.copytree(lora_run, tmp_path / "unnamed"), "adapter_config.json")
    unnamed.write_text(json.dumps(json.loads(unnamed.read_text()) | {"base_model_name_or_path": None}))
    for folder, flags, words in (
        (lora_run, ["--adapters", "--base", model_folder], f"were not trained on {model_folder}, whose"),
        (lora_run, ["--base", model_folder], "--base needs --adapters"),
        (unnamed.parent, ["--adapters"], "names no base model; pass --base"),
    ):
        assert_usage_error(export(folder, *flags), words, program="export")
        assert not out.exists()
    code, _, err = export(lora_run, "--adapters")
    assert code == 0 and "merged" not in err
    run, base = (Captioner.from_pretrained(folder, "cpu", "float32") for folder in (lora_run, EMBEDDED))
    inputs = inputs_of(run, [load_image(SAMPLE)], PROMPT)
    arguments = inputs["input_ids"], inputs["images"]
    assert_same_logits(base.model, their_model(out), *arguments)
    adapted = their_model(out, out / "adapter")
    with pytest.raises(AssertionError):
        assert_same_logits(base.model, adapted, *arguments, tolerance=0.1)
    assert_same_logits(run.model, adapted, *arguments, tolerance=1e-2)  # stored as float16
    read_adapters(lora_run, base.model)
    assert_same_logits(base.model, adapted, *arguments)
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(out.resolve())
    code, _, err = export(lora_run)
    assert code == 0 and "merged into the weights; --adapters" in err
    assert_same_logits(run.model, their_model(out), *arguments)


@pytest.mark.full
@torch.no_grad()
def test_adapters_of_a_smolvlm_are_exported_beside_it(run_lora, export, tmp_path):
    theirs, processor = write_folder(tmp_path / "base")
    run = run_lora(tmp_path / "base")
    assert export(run, "--adapters")[0] == 0
    inputs = their_inputs(processor, [load_image(SAMPLE)], ["What is this?"])
    assert torch.equal(their_model(tmp_path / "out")(**inputs).logits, theirs(**inputs).logits)
    adapted, expected = their_model(tmp_path / "out", tmp_path / "out" / "adapter"), their_model(run)
    torch.testing.assert_close(adapted(**inputs).logits, expected(**inputs).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(theirs(**inputs).logits, expected(**inputs).logits, atol=1e-2)


def test_no_model_is_exported_onto_itself_or_without_its_factor(model_folder, changed_model, export, run_script):
    assert_usage_error(export(changed_model(lm_attn_scaling=1.5)), "lm_attn_scaling=1.5", program="export")
    before = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    result = run_script("export", "export", model_folder, "--out", f"{model_folder}/.")
    assert_usage_error(result, "is the model's own folder", program="export")
    assert {path.name: path.read_bytes() for path in model_folder.iterdir()} == before


BEFORE = [  # files of the output folder, flags, words of the error or none
    ("", "", ""),
    ("notes.txt photos/config.json", "", ""),
    (f"{MARKER} config.json special_tokens_map.json notes.txt", "", ""),
    ("config.json", "", "holds config.json, which is of no former export"),
    ("model.safetensors notes.txt", "", "holds model.safetensors"),
    ("model.safetensors", "--gguf", "holds model.safetensors"),
    ("preprocessor_config.json", "", "holds preprocessor_config.json"),
    ("mine-f16.gguf", "--gguf", "holds mine-f16.gguf"),
    ("adapter/adapter_config.json", "--adapters", "holds adapter"),
    ("onnx/decoder.onnx", "--onnx", "holds onnx"),
]


@pytest.mark.parametrize(("before", "flags", "refusal"), BEFORE)
def test_an_export_replaces_former_exports_only(model_folder, tmp_path, export, before, flags, refusal):
    """Of these, nothing stays that readers would take for files of the new one."""
    out = tmp_path / "out"
    for name in before.split():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"size": 1}')
    held = sorted(out.rglob("*"))
    code, _, err = export(model_folder, *flags.split())
    if "the extra gguf" in err:
        pytest.skip("needs the extra gguf")
    if refusal:
        assert code == 2 and refusal in err and err.count("\n") == 1 and sorted(out.rglob("*")) == held
        assert all((out / name).read_text() == '{"size": 1}' for name in before.split())
        return
    assert code == 0 and (out / MARKER).exists() and not (out / "special_tokens_map.json").exists()
    assert all((out / name).exists() for name in before.split() if "notes" in name or "photos" in name)
    assert Captioner.from_pretrained(out, "cpu").caption(SAMPLE, max_new_tokens=1) is not None


def test_a_model_of_nanovlms_layout_becomes_gguf_files_and_edits_are_named(model_folder, export, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    code, _, err = export(model_folder, "--gguf")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.gguf"))
    assert code == 0 and names == ["mmproj-random-f16.gguf", "random-f16.gguf"]
    assert err.count("\n") == 2 and "llama.cpp lays out tiles and chats as SmolVLM does" in err
    monkeypatch.setattr(MLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    for flags in ((), ("--gguf",)):
        shutil.rmtree(tmp_path / "out")
        code, _, err = export(model_folder, *flags)
        assert code == 0 and "as it was published, but models/language_model.py is edited or patched" in err


KILLED = """
import os, sys
from nanovlm.cli.main import main
from nanovlm.export import transformers
transformers.remove_stale = lambda *arguments: os._exit(9)  # behind the first files; no `finally` runs, as after a kill
main(sys.argv[1:])
"""


def test_an_export_that_was_killed_or_failed_halfway_can_be_run_again(model_folder, export, tmp_path, monkeypatch):
    """And a day after a kill, what it left is removed."""
    out = tmp_path / "out"
    for name in (f"{files.PART}0", ".theirs.tmp"):
        (out / name).mkdir(parents=True)
        os.utime(out / name, (0, 0))
    argv = ["export", str(model_folder), "--out", str(out)]
    assert subprocess.run([sys.executable, "-c", KILLED, *argv], cwd=ROOT).returncode == 9
    assert (out / "config.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr("nanovlm.export.transformers.remove_stale", lambda *arguments: os.stat("no space left"))
        assert export(model_folder)[0] == 1
    assert export(model_folder)[0] == 0
    assert not (out / f"{files.PART}0").exists() and (out / ".theirs.tmp").is_dir()


def test_an_export_that_wrote_nothing_leaves_nothing(model_folder, export, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovlm.export.transformers.smolvlm_tensors", lambda model: 1 / 0)
    assert export(model_folder)[0] == 70 and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").touch()
    assert export(model_folder)[0] == 70
    assert [path.name for path in tmp_path.glob("out/*")] == ["notes.txt"]
