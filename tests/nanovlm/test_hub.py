"""push_to_hub: model, tokenizer and card in one commit, and nothing else."""

import inspect
import json
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, ModelCard

from models.checkpoint import load_config
from nanovlm import EMBEDDED
from nanovlm.errors import CheckpointError
from nanovlm.hub import model_card, push_to_hub


@pytest.fixture
def calls(monkeypatch):
    """The calls of a fake HfApi."""
    calls = []

    class Api:
        def __init__(self, **options):
            calls.append(("HfApi", options))

        def create_repo(self, repo_id, **options):
            calls.append(("create_repo", repo_id, options))

        def create_branch(self, repo_id, **options):
            calls.append(("create_branch", repo_id, options))

        def create_commit(self, repo_id, operations, commit_message, revision=None):
            files = {operation.path_in_repo: operation for operation in operations}
            calls.append(("create_commit", repo_id, files, revision))
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return calls


def test_one_commit_holds_model_files_and_card(calls, model_folder, tmp_path):
    (model_folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (model_folder / "README.md").write_text("notes of my own")
    try:
        url = push_to_hub(model_folder, "me/model", recipe="Two days of luck.", results={"exact": "97.9%"}, token="t")
    finally:
        (model_folder / "pytorch_model.bin").unlink()
        (model_folder / "README.md").unlink()
    assert url == "https://hub/me/model/commit/1"
    assert [call[0] for call in calls] == ["HfApi", "create_repo", "create_commit"]
    assert calls[0][1] == {"token": "t"}
    assert calls[1][1:] == ("me/model", {"private": False, "exist_ok": True})
    _, repo_id, files, revision = calls[2]
    assert repo_id == "me/model" and revision is None
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files.keys() == model | {"README.md"}
    with files["config.json"].as_file() as file:  # stock nanoVLM looks the tokenizer up by its name
        assert json.load(file) == json.loads((model_folder / "config.json").read_text()) | {"lm_tokenizer": "me/model"}
    for name in files.keys() - {"README.md", "config.json"}:
        with files[name].as_file() as file:
            assert file.read() == (model_folder / name).read_bytes()
    with files["README.md"].as_file() as file:
        card = file.read().decode("utf-8")
    assert "Two days of luck." in card and "| exact | 97.9% |" in card and "notes of my own" not in card


def test_private_repository(calls, model_folder):
    push_to_hub(model_folder, "me/model", private=True)
    assert calls[1][2]["private"] is True


def test_tokenizer_config_is_optional(calls):
    push_to_hub(EMBEDDED, "me/model")
    assert calls[2][2].keys() == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}


def test_revision_creates_the_branch_and_commits_to_it(calls, model_folder):
    push_to_hub(model_folder, "me/model", revision="tuned")
    assert [call[0] for call in calls] == ["HfApi", "create_repo", "create_branch", "create_commit"]
    assert calls[2][1:] == ("me/model", {"branch": "tuned", "exist_ok": True}) and calls[3][3] == "tuned"


def test_fake_api_has_the_real_signatures():
    """The parameters that the calls above name are the real client's."""
    wanted = {"create_repo": {"private", "exist_ok"}, "create_branch": {"branch", "exist_ok"}}
    wanted |= {"create_commit": {"operations", "commit_message", "revision"}}
    for name, parameters in wanted.items():
        assert parameters <= inspect.signature(getattr(HfApi, name)).parameters.keys()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_folder_is_not_uploaded(calls, tmp_path, model_folder, name):
    for path in model_folder.iterdir():
        if path.name != name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        push_to_hub(tmp_path, "me/model")
    assert calls == []


def test_card_is_parsed_by_the_hub_client(tiny_config):
    cfg = tiny_config(vit_model_type="google/siglip2-base-patch16-512", lm_model_type=str(EMBEDDED))
    card = ModelCard(model_card(cfg, "me/model", license="mit"))
    card_data = card.data.to_dict()
    assert card_data["library_name"] == "nanovlm" and card_data["pipeline_tag"] == "image-text-to-text"
    assert card_data["license"] == "mit" and card_data["base_model"] == ["google/siglip2-base-patch16-512"]
    assert 'Captioner.from_pretrained("me/model")' in card.text
    assert "Recipe" not in card.text and "Results" not in card.text


def test_card_without_backbones_names_no_base_model(tiny_config):
    card = ModelCard(model_card(load_config(EMBEDDED), "me/model"))
    assert "base_model" not in card.data.to_dict() and "license" not in card.data.to_dict()
