"""upload_checkpoint: the model's files in one commit, and nothing else."""

import inspect
import json
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from nanovlm import EMBEDDED
from nanovlm.hub import upload_checkpoint


@pytest.fixture
def calls(monkeypatch):
    """The calls of a fake HfApi."""
    calls = []

    class Api:
        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options))

        def create_commit(self, repo_id, operations, commit_message):
            calls.append((repo_id, {operation.path_in_repo: operation for operation in operations}))
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    for name, parameters in {"create_repo": {"private", "exist_ok"}, "create_commit": {"commit_message"}}.items():
        assert parameters <= inspect.signature(getattr(HfApi, name)).parameters.keys(), "as the real client"
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return calls


def test_one_commit_holds_the_models_files_and_no_other(calls, model_folder):
    stray = model_folder / "pytorch_model.bin"
    stray.write_bytes(b"a pickle")
    try:
        url = upload_checkpoint(model_folder, "me/model", private=True)
    finally:
        stray.unlink()
    created, (repo_id, files) = calls
    assert created == ("me/model", {"private": True, "exist_ok": True})
    assert url == "https://hub/me/model/commit/1" and repo_id == "me/model"
    assert files.keys() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    with files["config.json"].as_file() as file:  # stock nanoVLM looks the tokenizer up by its name
        assert json.load(file) == json.loads((model_folder / "config.json").read_text()) | {"lm_tokenizer": "me/model"}
    for name in files.keys() - {"config.json"}:
        with files[name].as_file() as file:
            assert file.read() == (model_folder / name).read_bytes()


def test_tokenizer_config_is_optional_and_a_card_stays_at_home(calls):
    upload_checkpoint(EMBEDDED, "me/model", private=False)
    assert calls[1][1].keys() == {"config.json", "model.safetensors", "tokenizer.json"}
