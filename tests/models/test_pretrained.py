"""from_pretrained, save_pretrained and push_to_hub of the model itself, without tokenizers or images."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import tokenizers
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file

import models
from models.checkpoint import find_image_token_id, load_config
from models.common.errors import CheckpointError, InputError
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED
from nanovlm.processing.tokenizer import Tokenizer
from support import ROOT
from support.checkpoints import assert_same_state


def test_models_exports_its_classes_on_first_use():
    assert models.VisionLanguageModel is VisionLanguageModel
    assert {getattr(models, name).__name__ for name in models.__all__} == set(models.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        models.nothing  # noqa: B018


@pytest.mark.parametrize("dtype", ["float32", None, torch.int8])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype):
    with pytest.raises(InputError, match=f"dtype={dtype!r} is no floating-point dtype of torch; pass torch.float32"):
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


# ------------------------------------------------------------------------------------------------- the image token


def tokenizer_json(kind, added):
    """The text of a tokenizer of some kind that knows three words, and `<|image|>` as an added token or as a word."""
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (tokenizer_json("words", False).replace("<|image|>", "<x>"), "the tokenizer has no such token"),
        ("{}", "is not a tokenizer.json"),
        ('{"model": {"vocab": 5}}', "is not a tokenizer.json"),
        ('{"model": {"vocab": [1]}}', "is not a tokenizer.json"),
        ("[]", "holds list, not an object"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_tokenizer_without_the_image_token_is_one_line(tmp_path, tiny_config, text, message):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        find_image_token_id(tmp_path, tiny_config())
    assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)
