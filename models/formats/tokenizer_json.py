"""What a tokenizer.json says of a model's image token, read without the tokenizers library."""

from collections.abc import Mapping
from pathlib import Path

from models.checkpoint import TOKENIZER, read_object
from models.config import VLMConfig
from models.errors import CheckpointError

# Without this in tokenizer_config.json, transformers 4 adds token_type_ids, which no model here takes.
MODEL_INPUT_NAMES = ["input_ids", "attention_mask"]
NO_IMAGE_TOKEN = -1  # nanoVLM v0.1 has no token for images


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
