"""Checkpoint folders: round trips are bit-exact, stock nanoVLM reads them, and errors are one line.

Models are read without tokenizers or images: nanovlm is not needed.
"""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub.constants
import pytest
import tokenizers
import torch
from huggingface_hub import HfApi
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import load_model as load_strictly

import models
from models import checkpoint
from models.checkpoint import checkpoint_dtype, find_image_token_id, load_config, save_checkpoint, snapshot_path
from models.common.errors import CheckpointError, InputError
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm import EMBEDDED
from nanovlm.options import check_output_folder
from nanovlm.processing.tokenizer import Tokenizer
from support import ROOT
from support.checkpoints import EMBEDDING, HEAD, INV_FREQ, assert_same_state, stock_model, stock_shapes

TOKENIZER = '{"model": "ünïcode"}'


def read(folder, dtype=torch.float32):
    return load_model(folder, load_config(folder), 3, dtype)


@pytest.fixture
def folder(tmp_path, tiny_model):
    save_checkpoint(tmp_path / "model", tiny_model(), TOKENIZER)
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_checkpoint_is_read_bit_for_bit_here_and_by_stock_nanovlm(tmp_path, tiny_model, tied, dtype):
    model = tiny_model(lm_tie_weights=tied, lm_re_base=100000, lm_hidden_dim=48).to(dtype)
    save_checkpoint(folder := tmp_path / "a" / "b", model, TOKENIZER)
    again = read(folder, dtype)
    assert_same_state(again, model)
    assert again.cfg == model.cfg and not again.training and checkpoint_dtype(folder) == dtype
    assert (again.decoder.head.weight is again.decoder.token_embedding.weight) == tied
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == TOKENIZER

    with safe_open(folder / "model.safetensors", "pt") as file:
        names, metadata, inv_freq = set(file.keys()), file.metadata(), file.get_tensor(INV_FREQ)
    assert names == (stock_shapes(model.cfg).keys() | {INV_FREQ}) - ({EMBEDDING} if tied else set())
    assert metadata == {"format": "pt"} and inv_freq.dtype == torch.float32
    assert inv_freq.tolist() == pytest.approx([100000 ** (-2 * i / 8) for i in range(4)])
    stock = stock_model(model.cfg)
    assert load_strictly(stock, folder / "model.safetensors", strict=True) == (set(), [])
    del stock.decoder.rotary_embd
    assert_same_state(stock.to(dtype), model)


def weights(drop=(), **add):
    """Drop tensors of model.safetensors and store others; a function changes the tensor that is there."""

    def damage(folder):
        state = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        added = {name: value(state[name]) if callable(value) else value for name, value in add.items()}
        state = {name: tensor for name, tensor in state.items() if name not in drop} | added
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return damage


def test_either_name_of_a_tied_pair_will_do_and_both_if_they_agree_and_inv_freq_is_not_needed(folder, tiny_model):
    head = tiny_model().decoder.head.weight.detach()
    for change in (weights(**{EMBEDDING: head}), weights([HEAD]), weights([INV_FREQ])):
        change(folder)
        assert_same_state(read(folder), tiny_model())


def data(change):
    return lambda folder: (path := folder / "model.safetensors").write_bytes(change(path.read_bytes()))


def config(**changes):
    def damage(folder):
        raw = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in raw.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def config_text(text):
    return lambda folder: (folder / "config.json").write_bytes(text.encode("latin-1"))


def pipe(name):
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


def index(weight_map):
    def damage(folder):
        (folder / "model.safetensors").rename(folder / "elsewhere")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def poisoned(value):
    return lambda tensor: tensor.view(-1).index_fill(0, torch.tensor(tensor.numel() // 2), value).view_as(tensor)


K, PROJ, BIAS = "decoder.blocks.1.attn.k_proj.weight", "MP.proj.weight", "vision_encoder.blocks.1.ln2.bias"
CUT_OFF = "model.safetensors cannot be read, it may be truncated"
DAMAGED = [  # what is done to the folder, and words of the error
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (config_text('{"lm_n_heads": 6,}'), "config.json cannot be read"),
    (config_text("\xff\xfe{}"), "config.json is not UTF-8"),
    (config_text('{"a": "\\ud800"}'), "config.json cannot be read"),
    (config_text("[" * 100_000), "config.json cannot be read"),
    (config_text("[]"), "holds list, not an object"),
    (pipe("config.json"), "config.json is a pipe or a device, not a file"),
    (config(lm_re_base=10**400), "config.json: "),
    (config(vlm_extra_tokens=5), "vlm_extra_tokens=5"),
    (config(lm_n_heads=5), "lm_hidden_dim=24 is not a multiple of lm_n_heads=5"),
    (config(quantization_config={"bits": 4}), "has a quantization_config: take the model in 16 bits"),
    (config(model_type="llava", lm_hidden_dim=None), "config.json: model_type='llava' is no"),
    (config(lm_use_tokens=True), "config.json: lm_use_tokens=true"),
    (config(lm_n_blocks=10**9), "lm_n_blocks=1000000000 is outside [1, 500)"),
    (config(lm_vocab_size=10**9), f"{HEAD} is (40, 24), but config.json asks for (1000000000, 24)"),
    (config(lm_inter_dim=2**31 - 1), "gate_proj", "(32, 24)", "(2147483647, 24)"),
    (
        config(vit_img_size=2**30, max_img_size=2**30, mp_pixel_shuffle_factor=2**26, mp_image_token_length=None),
        "position_embedding", "(1, 16, 16)", f"(1, {2**56}, 16)",
    ),
    (
        config(vit_patch_size=2**29, vit_img_size=2**30, max_img_size=2**30, mp_image_token_length=None),
        "larger than any memory", "vit_patch_size=536870912",
    ),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin may run code and is not read",
    ),
    (pipe("model.safetensors"), "model.safetensors is a pipe or a device"),
    *((index(names), "no weight_map of tensors to files beside it") for names in (None, {}, {"a": "../a"}, {"a": 5})),
    (index({"a": "model-1.safetensors"}), "model-1.safetensors is missing, which model.safetensors.index.json names"),
    *((data(lambda old, n=n: old[:n]), CUT_OFF) for n in (0, 20_000)),
    *((data(lambda old, n=n: struct.pack("<Q", n) + old[8:]), CUT_OFF) for n in (0, 10**9, 2**63, 2**64 - 1)),
    (data(lambda old: old.replace(b'"F32"', b'"F33"', 1)), CUT_OFF),
    (data(lambda old: old.replace(b"[24,64]", b"[24,65]", 1)), CUT_OFF),
    (data(lambda old: struct.pack("<Q", 2) + b"{}"), "lacks"),
    (weights(**{K: torch.zeros(9, 24)}), f"{K} is (9, 24), but config.json asks for (8, 24)"),
    (weights([K, PROJ]), "lacks 2 tensors", f"first {PROJ}"),
    (weights([HEAD]), "lacks 1 tensors", HEAD),
    (weights(**{"MP.proj.bias": torch.zeros(24)}), "has 1 tensors that config.json has no place for", "'MP.proj.bias'"),
    (weights(**{EMBEDDING: torch.zeros(40, 24)}), f"config.json ties {EMBEDDING} and {HEAD}, but they differ"),
    *(
        (weights(**{name: poisoned(bad)}), f"model.safetensors: {name} has values from", str(bad), "must be finite")
        for name, bad in ((PROJ, math.nan), (HEAD, math.inf), (BIAS, -math.inf))
    ),
    *(
        (weights(**{PROJ: torch.ones(24, 64).to(dtype)}), f"{PROJ} is stored as {dtype}, not as")
        for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), [(damage, words) for damage, *words in DAMAGED])
def test_a_broken_folder_raises_in_one_line(folder, damage, words):
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        read(folder, checkpoint_dtype(folder))
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_weights_too_large_for_a_precision_are_refused_in_that_precision_only(folder):
    weights(**{PROJ: torch.full((24, 64), 70000.0)})(folder)
    read(folder, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"MP.proj.weight has values from 70000.0 .* torch.float16 up to 65504.0"):
        read(folder, torch.float16)


def test_a_model_replaced_while_it_is_read_is_refused(folder, tiny_model, monkeypatch):
    saved = []

    def why_unusable(*inputs):
        if not saved:
            saved.append(save_checkpoint(folder, tiny_model(seed=1), TOKENIZER))
        return ""

    monkeypatch.setattr(checkpoint.weights, "why_unusable", why_unusable)
    with pytest.raises(CheckpointError, match="was replaced while it was read; try again"):
        read(folder)
    assert_same_state(read(folder), tiny_model(seed=1))


def test_weights_stay_memory_mapped_through_the_check(folder):
    model = read(folder)
    with open("/proc/self/maps" if os.path.exists("/proc/self/maps") else os.devnull) as maps:
        spans = [line.split()[0].split("-") for line in maps if str(folder) in line]
    if not spans:
        pytest.skip("this system does not tell what is mapped")
    for name, tensor in model.state_dict().items():
        assert any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in spans), name


@pytest.mark.parametrize("folder", [".", "", "there", "new/deeper"])
def test_a_model_is_saved_in_any_folder_but_not_in_a_file(tiny_model, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    tiny_model().save_pretrained(folder, tokenizer="{}")
    assert (Path(folder) / "model.safetensors").is_file() and (Path(folder) / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.rglob(".*")) and not list(tmp_path.parent.glob(".*.tmp")), "no temporary files are left"
    Path("file").touch()
    for inside in ("file", "file/model", "file/a/model"):
        with pytest.raises(InputError, match=f"{inside} is a file or lies below one; name a folder"):
            tiny_model().save_pretrained(inside)
    check_output_folder(tmp_path / "new/deeper", 1000)  # before the work
    for words, path, n in (("empty", "", 0), ("is a file", "file/x", 0), ("MiB are free", ".", 2**60)):
        with pytest.raises(InputError, match=words):
            check_output_folder(path and tmp_path / path, n)


@pytest.mark.parametrize(
    ("name", "found"), [("some/tokenizer", "some/tokenizer"), ("gpt2", "gpt2"), ("none", "HOME"), (".", "HOME")]
)
def test_config_says_where_stock_nanovlm_finds_the_tokenizer(tmp_path, tiny_model, name, found):
    checkpoint.write_checkpoint_files(tmp_path, tiny_model(lm_tokenizer=name), "{}", home="HOME")
    assert json.loads((tmp_path / "config.json").read_text())["lm_tokenizer"] == found


def test_snapshot_path_takes_folders_and_hub_ids_at_their_revision_and_refuses_others(folder, monkeypatch, hub):
    monkeypatch.chdir(folder)
    assert snapshot_path(folder) == snapshot_path(str(folder)) == folder
    for arguments, words in (
        ((folder / "config.json",), "config.json: a file, not a folder"),
        ((folder, "v1"), "is a folder, which has no revision 'v1'"),
        *(((name,), "neither a folder nor a Hub id") for name in ("nowhere", "a/b/c", "/no/such", "../x")),
    ):
        with pytest.raises(CheckpointError, match=words):
            snapshot_path(*arguments)
    hub["owner/name", "v1"] = folder
    assert snapshot_path("owner/name", "v1") == folder
    assert hub.calls == [("owner/name", "v1", ["*.json", "*.jinja", "*.safetensors"])]


def test_a_missing_hub_model_raises_in_one_line_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="^nobody-here/no-such-model: .*offline, pass a local folder.*$"):
        snapshot_path("nobody-here/no-such-model")


# ---- from_pretrained, save_pretrained and push_to_hub of the model itself -------------------------------------------


def test_models_exports_its_classes_on_first_use_and_refuses_dtypes_that_weights_cannot_have():
    assert models.VisionLanguageModel is VisionLanguageModel
    assert {getattr(models, name).__name__ for name in models.__all__} == set(models.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        models.nothing  # noqa: B018
    for dtype in ("float32", None, torch.int8):
        with pytest.raises(InputError, match=f"dtype={dtype!r} is no floating-point dtype of torch; pass torch.float"):
            VisionLanguageModel.from_pretrained("nobody/nothing", dtype=dtype)


def test_loading_needs_neither_nanovlm_nor_tokenizers():
    code = (
        "import sys, models; assert 'torch' not in sys.modules; from models import VisionLanguageModel; "
        f"assert VisionLanguageModel.from_pretrained({str(EMBEDDED)!r}).image_token_id > 0; "
        "print({'nanovlm', 'tokenizers', 'transformers', 'PIL', 'torchvision', 'torch._dynamo'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_saved_model_is_loaded_bit_for_bit_with_its_tokenizer_if_it_has_one(tmp_path, tiny_model):
    model = VisionLanguageModel.from_pretrained(EMBEDDED, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training and model.cfg == load_config(EMBEDDED)
    model.save_pretrained(tmp_path)
    again = VisionLanguageModel.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert again.cfg == model.cfg and again.image_token_id == model.image_token_id
    assert_same_state(again, model)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert (tmp_path / "tokenizer.json").read_bytes() == (EMBEDDED / "tokenizer.json").read_bytes()
    tiny_model().save_pretrained(tmp_path / "a", dtype=torch.float16)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"config.json", "model.safetensors"}
    assert load_file(tmp_path / "a" / "model.safetensors")["MP.proj.weight"].dtype == torch.float16


def test_a_model_is_pushed_with_its_files_when_asked(monkeypatch):
    hub, files = create_autospec(HfApi), {}

    def upload_folder(*, folder_path, **options):
        files.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
        return SimpleNamespace(commit_url="https://hub/commit")

    api = hub.return_value
    api.upload_folder.side_effect = upload_folder
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    model = VisionLanguageModel.from_pretrained(EMBEDDED)
    assert not hub.called
    assert model.push_to_hub("me/model", private=True, revision="tuned", token="t") == "https://hub/commit"
    hub.assert_called_once_with(token="t")
    api.create_repo.assert_called_once_with("me/model", private=True, exist_ok=True)
    api.create_branch.assert_called_once_with("me/model", branch="tuned", exist_ok=True)
    pushed = api.upload_folder.call_args.kwargs
    assert (pushed["repo_id"], pushed["revision"]) == ("me/model", "tuned")
    assert files.keys() == FILES
    assert json.loads(files["config.json"]) == model.cfg.to_dict() | {"lm_tokenizer": "me/model"}, "for stock nanoVLM"


def tokenizer_json(kind, added):
    words = ["a", "b", "<|endoftext|>", "<|im_end|>"] + ["<|image|>"] * (not added)
    if kind == "unigram":
        model = tokenizers.models.Unigram([(word, 0.0) for word in words], unk_id=0)
    else:
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    backend = tokenizers.Tokenizer(model)
    if added:
        backend.add_special_tokens(["<|image|>"])
    return backend.to_str()


@pytest.mark.parametrize("kind", ["words", "unigram"])
@pytest.mark.parametrize("added", [True, False])
def test_the_image_token_is_found_as_the_tokenizer_finds_it(tmp_path, tiny_config, kind, added):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(kind, added))
    cfg = tiny_config(vlm_extra_tokens={"image_token": "<|image|>"})
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # knows too few words for a model
    assert find_image_token_id(tmp_path, cfg) == Tokenizer(backend, cfg).image_token_id == 4
    cfg = load_config(EMBEDDED)
    assert find_image_token_id(EMBEDDED, cfg) == Tokenizer.from_pretrained(EMBEDDED, cfg).image_token_id


def test_without_a_tokenizer_extra_tokens_follow_the_base_vocabulary(tmp_path, tiny_config):
    tokens = {"other": "<x>", "image_token": "<|image|>"}
    cfg = tiny_config(vlm_extra_tokens=tokens, lm_base_vocab_size=38, extra_token_amount=2, lm_vocab_size=40)
    assert find_image_token_id(tmp_path, cfg) == 39
    first = tiny_config(vlm_extra_tokens=None, lm_chat_template=None, max_img_size=None)
    assert first.format_version == 1 and find_image_token_id(tmp_path, first) == -1


NO_TOKENIZER = {  # words of the error: texts of tokenizer.json
    "the tokenizer has no such token": [tokenizer_json("words", False).replace("<|image|>", "<x>")],
    "is not a tokenizer.json": ["{}", '{"model": {"vocab": 5}}', '{"model": {"vocab": [1]}}'],
    "holds list, not an object": ["[]"],
    "cannot be read": ["nonsense"],
}


@pytest.mark.parametrize("message", NO_TOKENIZER)
def test_a_tokenizer_without_the_image_token_is_one_line(tmp_path, tiny_config, message):
    for text in NO_TOKENIZER[message]:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=message) as error:
            find_image_token_id(tmp_path, tiny_config())
        assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)
