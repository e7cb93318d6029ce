"""`nanovlm export`."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoint import save_checkpoint
from models.lora.files import read_adapters
from nanovlm import EMBEDDED, PROMPT, SAMPLE, Captioner
from nanovlm.cli import main as cli
from nanovlm.cli.export import MARKER
from nanovlm.processing.image_loading import load_image
from nanovlm.synthetic import draw, random_scene
from support.generation import inputs_of
from support.smolvlm import assert_same_logits, their_inputs, write_folder


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_writes_a_folder_and_notes_what_does_not_map(tmp_path, tiled, capsys, dtype):
    transformers = pytest.importorskip("transformers")
    model, processor = tiled
    save_checkpoint(tmp_path / "model", model, processor.tokenizer.to_json())
    assert cli.main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--dtype", dtype]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("note: ") == err.count("\n") == 1
    assert "one image of 16 x 16 after <|global_image|>, without this model's tiles of up to 64" in err
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{dtype}"}

    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    inputs = inputs_of(
        Captioner(model, processor), [load_image(SAMPLE)], "Which tile?"
    )  # as the first note says: our ids and tiles
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


def run_lora(root, base, *more):
    """The folder of a short LoRA run on base."""
    (root / "data").mkdir()
    for i in range(2):
        scene = random_scene(random.Random(i))
        draw(scene).save(root / "data" / f"{i}.png")
        (root / "data" / f"{i}.txt").write_text("A photograph of my cat.")
    flags = "--max-steps 8 --batch-size 2 --num-workers 0 --device cpu --lora-rank 4 --lr 5e-2"
    argv = ["train", "--model", str(base), "--data", str(root / "data"), "--out", str(root / "run")]
    assert cli.main([*argv, *flags.split(), *more]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """A run on the embedded model."""
    return run_lora(tmp_path_factory.mktemp("lora"), EMBEDDED)


def their_model(folder, adapter=None):
    """What transformers loads from a folder, in float32, with PEFT's adapter of another one."""
    transformers, peft = map(pytest.importorskip, ("transformers", "peft"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)


@pytest.mark.full
@torch.no_grad()
def test_adapters_are_exported_beside_their_base_model(lora_run, tmp_path, capsys):
    """transformers and PEFT compute from base and adapters what the merged model of the run computes."""
    assert cli.main(["export", str(lora_run), "--adapters", "--out", str(tmp_path / "out")]) == 0
    run = Captioner.from_pretrained(lora_run, "cpu", "float32")
    inputs = inputs_of(run, [load_image(SAMPLE)], PROMPT)
    embedded = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    arguments = inputs["input_ids"], inputs["images"]
    assert_same_logits(embedded.model, their_model(tmp_path / "out"), *arguments)
    adapted = their_model(tmp_path / "out", tmp_path / "out" / "adapter")
    with pytest.raises(AssertionError):
        assert_same_logits(embedded.model, adapted, *arguments, tolerance=0.1)
    assert_same_logits(run.model, adapted, *arguments, tolerance=1e-2)  # stored as float16
    read_adapters(lora_run, embedded.model)
    assert_same_logits(embedded.model, adapted, *arguments)
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((tmp_path / "out").resolve())
    assert "merged" not in capsys.readouterr().err
    assert cli.main(["export", str(lora_run), "--out", str(tmp_path / "merged")]) == 0
    assert_same_logits(run.model, their_model(tmp_path / "merged"), *arguments)
    assert "merged into the weights; --adapters" in capsys.readouterr().err


@pytest.mark.full
@torch.no_grad()
def test_adapters_of_a_smolvlm_are_exported_beside_it(tmp_path):
    theirs, processor = write_folder(tmp_path / "base")
    run = run_lora(tmp_path, tmp_path / "base")
    assert cli.main(["export", str(run), "--adapters", "--out", str(tmp_path / "out")]) == 0
    inputs = their_inputs(processor, [load_image(SAMPLE)], ["What is this?"])
    assert torch.equal(their_model(tmp_path / "out")(**inputs).logits, theirs(**inputs).logits)
    adapted = their_model(tmp_path / "out", tmp_path / "out" / "adapter")
    expected = their_model(run)(**inputs).logits
    torch.testing.assert_close(adapted(**inputs).logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(theirs(**inputs).logits, expected, atol=1e-2)


@pytest.mark.full
def test_adapters_of_another_base_model_are_refused(lora_run, model_folder, tmp_path, capsys):
    path = Path(shutil.copytree(lora_run, tmp_path / "unnamed"), "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    for folder, flags, words in (
        (lora_run, ["--adapters", "--base", str(model_folder)], f"were not trained on {model_folder}, whose"),
        (lora_run, ["--base", str(model_folder)], "--base needs --adapters"),
        (path.parent, ["--adapters"], "names no base model; pass --base"),
    ):
        assert cli.main(["export", str(folder), "--out", str(tmp_path / "out"), *flags]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_model_is_not_exported_onto_itself(model_folder, capsys):
    before = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    assert cli.main(["export", str(model_folder), "--out", f"{model_folder}/."]) == 2
    assert "is the model's own folder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model_folder.iterdir()} == before


@pytest.mark.parametrize(
    ("before", "flags", "refusal"),
    [
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
        ("notes.txt", "--gguf", "this model has nanovlm's layout"),
    ],
)
def test_an_export_replaces_former_exports_only(model_folder, tmp_path, capsys, before, flags, refusal):
    """Of these, nothing stays that readers would take for files of the new one."""
    out = tmp_path / "out"
    for name in before.split():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"size": 1}')
    held = sorted(out.rglob("*"))
    code = cli.main(["export", str(model_folder), "--out", str(out), *flags.split()])
    err = capsys.readouterr().err
    if "the extra gguf" in err:
        pytest.skip("needs the extra gguf")
    if refusal:
        assert code == 2 and refusal in err and err.count("\n") == 1 and sorted(out.rglob("*")) == held
        assert all((out / name).read_text() == '{"size": 1}' for name in before.split())
        return
    assert code == 0 and (out / MARKER).exists() and not (out / "special_tokens_map.json").exists()
    assert all((out / name).exists() for name in before.split() if "notes" in name or "photos" in name)
    assert Captioner.from_pretrained(out, "cpu").caption(SAMPLE, max_new_tokens=1) is not None


def test_an_export_that_failed_halfway_can_be_run_again(model_folder, tmp_path, monkeypatch):
    def fails(*arguments):
        raise OSError("no space left")

    argv = ["export", str(model_folder), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr("nanovlm.export.transformers.remove_stale", fails)
        assert cli.main(argv) == 1
    assert cli.main(argv) == 0
