"""Uploading a model folder to the Hugging Face Hub."""

import json
from pathlib import Path

from models.checkpoint import CONFIG, TOKENIZER, WEIGHTS, read_object
from models.formats import other_files, recognize


def upload_checkpoint(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload the model's files in folder, and no other, to the Hub as one commit; returns the commit's URL.

    The repository owner/name is created if needed. The token is that of `hf auth login`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    known = dict.fromkeys((WEIGHTS, TOKENIZER, *other_files()))
    names = [name for name in known if (folder / name).is_file()]
    config = read_object(folder / CONFIG)
    if TOKENIZER in names:
        config = recognize(config, CONFIG).at_home(config, repo_id)
    operations = [CommitOperationAdd(CONFIG, (json.dumps(config, indent=2) + "\n").encode("utf-8"))]
    operations += [CommitOperationAdd(name, str(folder / name)) for name in names]
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    return api.create_commit(repo_id, operations, commit_message="Upload model").commit_url
