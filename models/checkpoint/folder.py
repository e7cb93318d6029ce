"""The JSON files of a model's folder, and where the folder is: by its path, or by a Hub id."""

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from models.common import files
from models.common.errors import CheckpointError, FileError
from models.config import VLMConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"


def snapshot_path(
    name_or_folder: str | os.PathLike[str], revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """The local folder of a model: the folder itself, or the snapshot of a Hub id, downloaded unless it is cached.

    patterns name what to download, by default of everything that a model's folder may hold.
    """
    folder = Path(name_or_folder)
    name = str(name_or_folder)
    if folder.is_dir():
        if revision:
            raise CheckpointError(f"{name} is a folder, which has no revision {revision!r}; leave revision out")
        return folder
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        kind = "a file, not a folder" if folder.exists() else "neither a folder nor a Hub id like owner/name"
        raise CheckpointError(f"{name}: {kind}; pass a folder with {CONFIG} and {WEIGHTS}")

    from huggingface_hub import snapshot_download

    patterns = list(patterns or ("*.json", "*.jinja", "*.safetensors"))
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of many kinds, from DNS to disk
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: no such folder, and the Hub could not be reached or has no such model ({reason}); "
            "if you are offline, pass a local folder instead"
        ) from error


def read_object(path: Path) -> dict:
    """The object in a JSON file of a model's folder. Raises CheckpointError if there is none."""
    return parse_object(read_model_text(path), path)


def parse_object(text: str, name: object) -> dict:
    """The object in the text of a file called name. Lone surrogates are refused: no file could hold them."""
    try:
        raw = json.loads(text)
        json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{name} holds {type(raw).__name__}, not an object of settings")
    return raw


def read_model_text(path: Path) -> str:
    """The text of a file in a model's folder; CheckpointError if it cannot be read."""
    try:
        return files.read_text(path)
    except FileError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointError(f"{path.parent} has no {path.name}; a model has {CONFIG} and {WEIGHTS}") from None
        raise CheckpointError(error) from None


def vocabulary(path: Path) -> dict[str, int]:
    """Ids by token of a tokenizer.json."""
    raw = read_object(path)
    try:
        ids = raw["model"]["vocab"]
        if isinstance(ids, list):  # Unigram: pieces with scores
            ids = {piece: i for i, (piece, _) in enumerate(ids)}
        ids |= {entry["content"]: entry["id"] for entry in raw.get("added_tokens") or ()}
        return {token: id for token, id in ids.items() if type(id) is int}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a {TOKENIZER} of the tokenizers library: {error!r}") from None


def is_base_vocabulary(ids: Mapping[str, int], cfg: VLMConfig) -> bool:
    """Tell a language model's own tokenizer, to which stock nanoVLM adds the extra tokens, by its ids."""
    return len(ids) == cfg.lm_base_vocab_size == max(ids.values(), default=-1) + 1


def missing_token(cfg: VLMConfig, name: str, n_tokens: int) -> str:
    """The message for a tokenizer of n_tokens that lacks an extra token and is not the language model's own."""
    return (
        f"vlm_extra_tokens names {name}={cfg.special_tokens[name]!r}, but the tokenizer has no such token, and with "
        f"{n_tokens} tokens it is not the language model's own of lm_base_vocab_size={cfg.lm_base_vocab_size}"
    )
