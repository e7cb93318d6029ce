"""Uploading a model folder and its card to the Hugging Face Hub."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from models.checkpoint import CONFIG, TOKENIZER, WEIGHTS, load_config, read_object
from models.config import VLMConfig
from models.formats import other_files, recognize
from nanovlm.errors import CheckpointError

REQUIRED_FILES = (CONFIG, WEIGHTS, TOKENIZER)


def push_to_hub(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    recipe: str = "",
    results: Mapping[str, object] | None = None,
    license: str | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Upload the model in folder to the repository owner/name, as one commit with its card; returns the commit's URL.

    The repository, and the branch named by revision, are created if needed. recipe (Markdown) and results (metric to
    value) go into the card. Without token, that of `hf auth login` is used. Only the model's own files are uploaded,
    no other file of the folder. Raises CheckpointError, before anything is sent, if the folder lacks one of them.
    """
    folder = Path(folder)
    cfg = load_config(folder)
    for name in REQUIRED_FILES:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}; nothing was uploaded")

    card = model_card(cfg, repo_id, recipe=recipe, results=results, license=license)
    return upload_checkpoint(folder, repo_id, card=card, private=private, revision=revision, token=token)


def upload_checkpoint(
    folder: Path,
    repo_id: str,
    *,
    card: str | None = None,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Upload the model's files in folder, and no other, to the Hub as one commit; returns the commit's URL.

    The repository owner/name, and the branch named by revision, are created if needed. card is the text of README.md.
    Without token, that of `hf auth login` is used.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    known = dict.fromkeys((WEIGHTS, TOKENIZER, *other_files()))
    names = [name for name in known if (folder / name).is_file()]
    config = read_object(folder / CONFIG)
    if TOKENIZER in names:
        config = recognize(config, CONFIG).at_home(config, repo_id)
    operations = [CommitOperationAdd(CONFIG, (json.dumps(config, indent=2) + "\n").encode("utf-8"))]
    operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
    if card is not None:
        operations.append(CommitOperationAdd("README.md", card.encode("utf-8")))
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.create_commit(repo_id, operations, commit_message="Upload model", revision=revision).commit_url


def model_card(
    cfg: VLMConfig,
    repo_id: str,
    *,
    recipe: str = "",
    results: Mapping[str, object] | None = None,
    license: str | None = None,
) -> str:
    """The model card (README.md): metadata in YAML, usage, recipe and results."""
    from huggingface_hub import ModelCardData

    backbones = [name for name in (cfg.vit_model_type, cfg.lm_model_type) if name.count("/") == 1]
    data = ModelCardData(
        library_name="nanovlm",
        pipeline_tag="image-text-to-text",
        tags=["nanovlm", "vision-language"],
        license=license,
        base_model=[name for name in backbones if not Path(name).exists()] or None,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo_id.rpartition('/')[2]}",
        f"A vision-language model: a vision encoder of {cfg.vit_n_blocks} blocks on images of {cfg.vit_img_size} "
        f"pixels a side, and a language model of {cfg.lm_n_blocks} blocks and {cfg.lm_vocab_size:,} tokens.",
        "## Usage",
        f'```python\nfrom nanovlm import Captioner\n\ncaptioner = Captioner.from_pretrained("{repo_id}")\n'
        'print(captioner.caption("image.png"))\n```',
    ]
    if recipe:
        sections += ["## Recipe", recipe]
    if results:
        rows = "\n".join(f"| {name} | {value} |" for name, value in results.items())
        sections += ["## Results", f"| what | value |\n|---|---|\n{rows}"]
    return "\n\n".join(sections) + "\n"
