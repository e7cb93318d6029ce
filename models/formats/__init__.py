"""Checkpoint formats: one file for each layout of a model's folder, and loaders of other models' weights.

A format is a `CheckpointFormat`. `load_config` chooses one of FORMATS by config.json, and the core does not ask again:
what differs is a method or an attribute of `cfg.format`. A new format is a file here, a line in FORMATS and in
MODEL_TYPES, and for images and prompts a layout in `nanovlm.processing.layouts`. A format's file is imported when a
model of it is first met.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path

from models.checkpoint import TOKENIZER, read_object
from models.config import CheckpointFormat, VLMConfig
from models.errors import CheckpointError

FORMATS = {"nanovlm": "NanoVLM", "smolvlm": "SmolVLM", "visionpsy": "VisionPsy"}  # a file here, and the class in it
# model_type of config.json; nanoVLM's own has none
MODEL_TYPES = {"idefics3": "smolvlm", "smolvlm": "smolvlm", "visionpsynano": "visionpsy", "visionpsy": "visionpsy"}
# Without this in tokenizer_config.json, transformers 4 adds token_type_ids, which no model here takes.
MODEL_INPUT_NAMES = ["input_ids", "attention_mask"]
NO_IMAGE_TOKEN = -1  # nanoVLM v0.1 has no token for images


def format_class(name: str) -> type[CheckpointFormat]:
    """The class of one of FORMATS."""
    return getattr(importlib.import_module(f"models.formats.{name}"), FORMATS[name])


def other_files() -> list[str]:
    """The files that a folder of any format may hold beside config.json, weights and tokenizer.json."""
    return list(dict.fromkeys(file for name in FORMATS for file in format_class(name).other_files))


def recognize(raw: dict, where: str) -> type[CheckpointFormat]:
    """The format of the object of a config.json, which `where` names in errors; CheckpointError if it is no FORMAT."""
    if name := MODEL_TYPES.get(str(raw.get("model_type"))):
        return format_class(name)
    if "model_type" not in raw or "lm_hidden_dim" in raw:
        return format_class("nanovlm")
    raise CheckpointError(
        f"{where}: model_type={raw['model_type']!r} is none of {', '.join(MODEL_TYPES)}, and nanoVLM's own "
        "config.json has none; take a model of one of these"
    )


# ---------------------------------------------------------------------------------------- the image token's id


def find_image_token_id(folder: str | Path, cfg: VLMConfig) -> int:
    """The id of the image token: from tokenizer.json, or without one by nanoVLM's rule for extra tokens.

    A tokenizer.json of lm_base_vocab_size tokens is a backbone's own and is read as if the extra tokens followed.
    NO_IMAGE_TOKEN if cfg names none. Raises CheckpointError if the tokenizer does not know the token.
    """
    if cfg.vlm_extra_tokens is None:
        return NO_IMAGE_TOKEN
    token, path = cfg.vlm_extra_tokens["image_token"], Path(folder) / TOKENIZER
    if not path.exists():  # the extra tokens follow the base vocabulary, in their order
        return base_vocab_size(cfg) + list(cfg.vlm_extra_tokens).index("image_token")
    raw = read_object(path)
    try:
        ids = {entry["content"]: entry["id"] for entry in raw.get("added_tokens") or ()}
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pieces with scores
            vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        ids = vocabulary | ids
        image_token_id = ids.get(token)
        if image_token_id is None and is_base_vocabulary(ids, cfg):
            missing = [extra for extra in dict.fromkeys(cfg.special_tokens.values()) if extra not in ids]
            image_token_id = len(ids) + missing.index(token)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a {TOKENIZER} of the tokenizers library: {error!r}") from None
    if type(image_token_id) is not int:
        raise CheckpointError(f"{path}: {missing_token(cfg, 'image_token', len(ids))}")
    return image_token_id


def base_vocab_size(cfg: VLMConfig) -> int:
    """Size of the language model's vocabulary without extra tokens."""
    return cfg.lm_vocab_size if cfg.lm_base_vocab_size is None else cfg.lm_base_vocab_size


def is_base_vocabulary(ids: Mapping[str, int], cfg: VLMConfig) -> bool:
    """Whether a tokenizer with these ids is the language model's own, to which stock nanoVLM adds the extra tokens."""
    return len(ids) == cfg.lm_base_vocab_size == max(ids.values(), default=-1) + 1


def missing_token(cfg: VLMConfig, name: str, n_tokens: int) -> str:
    """The message for a tokenizer of n_tokens that lacks an extra token and is not the language model's own."""
    return (
        f"vlm_extra_tokens names {name}={cfg.special_tokens[name]!r}, but the tokenizer has no such token, and with "
        f"{n_tokens} tokens it is not the language model's own of lm_base_vocab_size={cfg.lm_base_vocab_size}"
    )
