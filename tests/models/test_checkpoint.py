"""Checkpoint folders: round trips are bit-exact, stock nanoVLM reads them, and errors are one line."""

import json
import math
import os
import struct
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import load_model as load_strictly

import models.checkpoint as checkpoint
from models.checkpoint import atomic_write, load_config, save_checkpoint, snapshot_path
from models.errors import CheckpointError, InputError
from models.vision_language_model import load_model
from nanovlm.options import check_output_folder
from support.checkpoints import EMBEDDING, HEAD, INV_FREQ, stock_model, stock_shapes

TOKENIZER = '{"model": "ünïcode"}'


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def read(folder, dtype=torch.float32):
    return load_model(folder, load_config(folder), 3, dtype)


@pytest.fixture
def folder(tmp_path, tiny_model):
    save_checkpoint(tmp_path / "model", tiny_model(), TOKENIZER)
    return tmp_path / "model"


@pytest.fixture
def rewrite(folder):
    def change(drop=(), **add):
        path = folder / "model.safetensors"
        state = {name: tensor.clone() for name, tensor in load_file(path).items() if name not in drop}
        save_file(state | add, path, {"format": "pt"})
        return state

    return change


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_checkpoint_is_read_bit_for_bit_here_and_by_stock_nanovlm(tmp_path, tiny_model, tied, dtype):
    model = tiny_model(lm_tie_weights=tied, lm_re_base=100000, lm_hidden_dim=48).to(dtype)
    save_checkpoint(folder := tmp_path / "a" / "b", model, TOKENIZER)
    again = read(folder, dtype)
    assert same(bits(again), bits(model)) and again.cfg == model.cfg and not again.training
    assert (again.decoder.head.weight is again.decoder.token_embedding.weight) == tied
    assert torch.equal(again.decoder.head.weight, again.decoder.token_embedding.weight) == tied
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == TOKENIZER

    with safe_open(folder / "model.safetensors", "pt") as file:
        names, metadata, inv_freq = set(file.keys()), file.metadata(), file.get_tensor(INV_FREQ)
    assert names == (stock_shapes(model.cfg).keys() | {INV_FREQ}) - ({EMBEDDING} if tied else set())
    assert metadata == {"format": "pt"}
    assert inv_freq.dtype == torch.float32
    assert all(math.isclose(f, 100000 ** (-2 * i / 8), rel_tol=1e-6) for i, f in enumerate(inv_freq.tolist()))
    stock = stock_model(model.cfg)
    assert load_strictly(stock, folder / "model.safetensors", strict=True) == (set(), [])
    loaded = {name: tensor.to(dtype) for name, tensor in stock.state_dict().items() if name != INV_FREQ}
    assert same(loaded, bits(model))


def test_either_name_of_a_tied_pair_will_do_and_both_if_they_agree_and_inv_freq_is_not_needed(folder, rewrite):
    expected = bits(read(folder))
    head = rewrite()[HEAD]
    for drop, add in (([], {EMBEDDING: head}), ([HEAD], {}), ([INV_FREQ], {})):
        rewrite(drop, **add)
        assert same(bits(read(folder)), expected)
    rewrite(**{HEAD: head + 1})
    with pytest.raises(CheckpointError, match=f"config.json ties {EMBEDDING} and {HEAD}, but they differ"):
        read(folder)
    rewrite(drop=[HEAD, EMBEDDING])
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors .* {HEAD}"):
        read(folder)


def test_mismatched_tensors_are_named_with_both_shapes(folder, rewrite):
    name = "decoder.blocks.1.attn.k_proj.weight"
    rewrite(**{name: torch.zeros(9, 24)})
    with pytest.raises(CheckpointError, match=rf"{name} is \(9, 24\), but config.json asks for \(8, 24\)"):
        read(folder)
    rewrite(drop=[name, "MP.proj.weight"])
    with pytest.raises(CheckpointError, match="lacks 2 tensors .* first MP.proj.weight"):
        read(folder)
    rewrite(**{"MP.proj.weight": torch.zeros(24, 64), name: torch.zeros(8, 24), "MP.proj.bias": torch.zeros(24)})
    with pytest.raises(CheckpointError, match="has 1 tensors .* first 'MP.proj.bias'"):
        read(folder)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["MP.proj.weight", HEAD, "vision_encoder.blocks.1.ln2.bias"])
def test_nonfinite_weights_are_named(folder, rewrite, name, bad):
    tensor = rewrite()[name]
    tensor.view(-1)[tensor.numel() // 2] = bad
    rewrite(**{name: tensor})
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {name} has values from .* to .* finite") as error:
        read(folder)
    assert str(bad) in str(error.value) and "\n" not in str(error.value)


def test_weights_too_large_for_a_precision_are_refused_in_that_precision_only(folder, rewrite):
    rewrite(**{"MP.proj.weight": torch.full((24, 64), 70000.0)})
    read(folder), read(folder, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"MP.proj.weight has values from 70000.0 .* torch.float16 up to 65504.0"):
        read(folder, torch.float16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_other_dtypes_are_refused(folder, rewrite, dtype):
    rewrite(**{"MP.proj.weight": torch.ones(24, 64).to(dtype)})
    with pytest.raises(CheckpointError, match=f"MP.proj.weight is stored as {dtype}, not as"):
        read(folder)


def test_a_model_replaced_while_it_is_read_raises(folder, tiny_model, monkeypatch):
    check, calls = checkpoint.why_unusable, []

    def why_unusable(*inputs):
        if not calls:
            save_checkpoint(folder, tiny_model(seed=1), TOKENIZER)
        calls.append(1)
        return check(*inputs)

    monkeypatch.setattr(checkpoint, "why_unusable", why_unusable)
    with pytest.raises(CheckpointError, match="was replaced while it was read; try again"):
        read(folder)
    assert len(calls) == checkpoint.MAX_MAPPED_TENSORS
    assert same(bits(read(folder)), bits(tiny_model(seed=1)))


def test_weights_stay_memory_mapped_through_the_check(folder):
    model = read(folder)
    with open("/proc/self/maps" if os.path.exists("/proc/self/maps") else os.devnull) as maps:
        spans = [line.split()[0].split("-") for line in maps if str(folder) in line]
    if not spans:
        pytest.skip("this system does not tell what is mapped")
    for name, tensor in model.state_dict().items():
        assert any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in spans), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_n_blocks": 10**9}, ["lm_n_blocks=1000000000 is outside [1, 500)"]),
        ({"lm_vocab_size": 10**9}, [HEAD, "(40, 24)", "(1000000000, 24)"]),
        ({"lm_inter_dim": 2**31 - 1}, ["gate_proj", "(32, 24)", "(2147483647, 24)"]),
        (
            {"vit_img_size": 2**30, "max_img_size": 2**30, "mp_pixel_shuffle_factor": 2**26},
            ["position_embedding", "(1, 16, 16)", f"(1, {2**56}, 16)"],
        ),
        (
            {"vit_patch_size": 2**29, "vit_img_size": 2**30, "max_img_size": 2**30},
            ["larger than any memory", "vit_patch_size=536870912"],
        ),
    ],
)
def test_every_absurd_size_is_named_with_its_number(folder, changes, message):
    raw = json.loads((folder / "config.json").read_text()) | changes
    if "vit_img_size" in changes:  # what it says follows from the sizes
        del raw["mp_image_token_length"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as error:
        read(folder)
    assert all(part in str(error.value) for part in message) and "\n" not in str(error.value), error.value


def with_weights(change):
    """Change the bytes of model.safetensors: the length of its header, the header, the tensors."""

    def damage(folder):
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


DAMAGED = [  # cut off, another length of the header, an unknown dtype, and more than the tensor's bytes
    *(lambda data, n=n: data[:n] for n in (0, 20_000)),
    *(lambda data, n=n: struct.pack("<Q", n) + data[8:] for n in (0, 20, 10**9, 2**63, 2**64 - 1)),
    lambda data: data.replace(b'"F32"', b'"F33"', 1),
    lambda data: data.replace(b"[24,64]", b"[24,65]", 1),
]


def with_config(change):
    def damage(folder):
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(raw)))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"lm_n_heads": 6,}'), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json cannot be read"),
        (with_config(lambda raw: [raw]), "holds list, not an object"),
        (with_config(lambda raw: raw | {"lm_re_base": 10**400}), "config.json: "),
        (with_config(lambda raw: raw | {"vlm_extra_tokens": 5}), "vlm_extra_tokens=5"),
        (with_config(lambda raw: raw | {"lm_n_heads": 5}), "lm_hidden_dim=24 is not a multiple of lm_n_heads=5"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        *((with_weights(change), "model.safetensors cannot be read") for change in DAMAGED),
        (with_weights(lambda data: struct.pack("<Q", 2) + b"{}"), "lacks"),
    ],
)
def test_a_broken_folder_raises_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        read(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"^.*{name} is a pipe or a device, not a regular file.*$"):
        read(folder)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("accident", [OSError("no space left"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_no_trace(folder, tiny_model, monkeypatch, accident):
    def fails(state, path, metadata):
        path.write_bytes(b"half of it")
        raise accident

    before = contents(folder.parent)
    monkeypatch.setattr(checkpoint, "save_file", fails)
    for target in (folder, folder.parent / "new"):
        with pytest.raises(type(accident)):
            save_checkpoint(target, tiny_model(seed=1), "{}")
    assert contents(folder.parent) == before and os.listdir(folder.parent) == ["model"]


def test_a_folder_written_again_holds_the_new_model_and_keeps_other_files(folder, tiny_model):
    (folder / "README.md").write_text("mine")
    save_checkpoint(folder, tiny_model(seed=1), "{}")
    assert same(bits(read(folder)), bits(tiny_model(seed=1)))
    assert (folder / "README.md").read_text() == "mine" and os.listdir(folder.parent) == ["model"]


def test_atomic_write_replaces_the_file_at_the_end(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text("old")
    with atomic_write(path) as new:
        new.write_text("new")
        assert path.read_text() == "old" and new.parent == tmp_path and new.suffix == ".json"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["notes.json"]
    with pytest.raises(ZeroDivisionError), atomic_write(path) as new:
        new.write_text("half of it")
        raise ZeroDivisionError
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["notes.json"]


@pytest.mark.skipif(os.name == "nt", reason="there is no umask on Windows")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_written_files_follow_the_umask(tmp_path, tiny_model, umask):
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "model", tiny_model(), TOKENIZER)
        with atomic_write(tmp_path / "notes.json") as new:
            new.write_text("{}")
    finally:
        os.umask(before)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o777 & ~umask
    for path in (tmp_path / "notes.json", *(tmp_path / "model").iterdir()):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path


def test_snapshot_path_takes_folders_and_refuses_other_names(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert snapshot_path(folder) == snapshot_path(str(folder)) == folder
    with pytest.raises(CheckpointError, match="config.json: a file, not a folder"):
        snapshot_path(folder / "config.json")
    for name in ("nowhere", "a/b/c", "/no/such", "../x"):
        with pytest.raises(CheckpointError, match="neither a folder nor a Hub id"):
            snapshot_path(name)


def test_a_hub_id_is_downloaded_at_its_revision(folder, hub):
    hub["owner/name", "v1"] = folder
    assert load_model(snapshot_path("owner/name", "v1"), load_config(folder), 3).cfg == load_config(folder)
    patterns = ["*.json", "*.jinja", "*.safetensors"]
    assert hub.calls == [("owner/name", "v1", patterns)]


def test_a_missing_hub_model_raises_in_one_line_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as error:
        snapshot_path("nobody-here/no-such-model")
    assert "nobody-here/no-such-model" in str(error.value) and "\n" not in str(error.value)
    assert "offline" in str(error.value) and "pass a local folder" in str(error.value)


@pytest.mark.parametrize("folder", [".", "", "there", "new/deeper"])
def test_a_model_is_saved_in_any_folder_by_one_name_or_another(tiny_model, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    tiny_model().save_pretrained(folder, tokenizer="{}")
    assert (Path(folder) / "model.safetensors").is_file() and (Path(folder) / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.rglob(".*")) and not list(tmp_path.parent.glob(".*.tmp")), "no temporary files are left"


def test_an_output_folder_is_checked_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    check_output_folder(tmp_path / "new/deeper", 1000)
    wrong = {"empty": ("", 0), "is a file": (tmp_path / "file/x", 0), "MiB are free": (tmp_path, 2**60)}
    for words, (folder, n) in wrong.items():
        with pytest.raises(InputError, match=words):
            check_output_folder(folder, n)
