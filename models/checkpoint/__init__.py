"""Checkpoint folders: config.json, model.safetensors and tokenizer.json; read strictly, written atomically.

`Format` says how the files name settings and tensors: it is nanoVLM's own format, and its subclasses in
`models.formats` are the others. This package knows state dicts, not model classes.
"""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint.folder import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    parse_object,
    read_model_text,
    read_object,
    snapshot_path,
)
from models.checkpoint.format import FORMATS, HEAD, NANOVLM, TOKENIZER_CONFIG, Format, format_of
from models.checkpoint.weights import (
    INDEX,
    checkpoint_dtype,
    open_tensors,
    read_state_dict,
    tensor_names,
    why_unusable,
)
from models.common import files
from models.common.errors import CheckpointError, FileError, InputError
from models.config import VLMConfig

__all__ = [
    "CONFIG", "FORMATS", "HEAD", "INDEX", "NANOVLM", "TOKENIZER", "TOKENIZER_CONFIG", "WEIGHTS", "Format",
    "checkpoint_dtype", "find_image_token_id", "format_of", "load_config", "open_tensors", "parse_object",
    "read_model_text", "read_object", "read_state_dict", "read_weights", "save_checkpoint", "snapshot_path",
    "tensor_names", "why_unusable", "write_checkpoint_files",
]  # fmt: skip


def load_config(folder: str | os.PathLike[str]) -> VLMConfig:
    """The config of the model in folder, in the format that config.json tells. CheckpointError if it cannot be used."""
    path = Path(folder) / CONFIG
    raw = read_object(path)
    if raw.get("quantization_config"):
        raise CheckpointError(f"{path} has a quantization_config: take the model in 16 bits, which quantize= reduces")
    kind = raw.get("model_type")
    format = FORMATS[str(kind)]() if str(kind) in FORMATS else Format
    if format is Format and kind is not None and not (FORMATS and "lm_hidden_dim" in raw):
        known = f"none of {', '.join(FORMATS)}, and nanoVLM's own config.json has none; take a model of one of these"
        cure = 'not nanoVLM\'s own format; "import models.formats" first, which reads others'
        raise CheckpointError(f"{path}: model_type={kind!r} is {known if FORMATS else cure}")
    try:
        others = [path.with_name(name) for name in format.other_files]
        return format.read_config(raw, {other.name: read_model_text(other) for other in others if other.exists()})
    except CheckpointError as error:  # names one of the files
        raise CheckpointError(f"{folder}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        message = re.sub(r"\b(vit|lm|mp)_\w+", lambda field: format.words.get(field[0], field[0]), str(error))
        raise CheckpointError(f"{path}: {message}") from None


def find_image_token_id(folder: str | os.PathLike[str], cfg: VLMConfig) -> int:
    """The id of the image token of the model in folder; see `Format.find_image_token_id`."""
    return format_of(cfg).find_image_token_id(Path(folder), cfg)


def read_weights(folder: str | os.PathLike[str], cfg: VLMConfig, empty: Mapping[str, Tensor], **options: Any) -> dict:
    """The state dict of the model in folder, of the names and shapes of `empty`; options are dtype and device."""
    format = format_of(cfg).for_names(tensor_names(Path(folder)))
    shapes = {name: tuple(tensor.shape) for name, tensor in format.to_stored(empty).items()}
    tied = format.tied if cfg.lm_tie_weights else None
    return format.from_stored(read_state_dict(folder, shapes, tied=tied, **options), empty)


def save_checkpoint(
    folder: str | os.PathLike[str], model: Any, tokenizer: str | None, dtype: torch.dtype | None = None
) -> None:
    """Write a model's folder atomically; see `write_checkpoint_files` and `files.filling`."""
    try:
        with files.filling(folder) as new:
            write_checkpoint_files(new, model, tokenizer, dtype)
    except FileError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise InputError(f"{folder} is a file or lies below one; name a folder") from None
        raise


def write_checkpoint_files(
    folder: Path, model: Any, tokenizer: str | None, dtype: torch.dtype | None = None, home: str | None = None
) -> None:
    """Write config, weights and tokenizer in the model's format; nanoVLM's so that stock nanoVLM loads them too.

    dtype is that of the stored weights; None keeps the model's. tokenizer is the text of tokenizer.json; None writes no
    tokenizer. home is the folder's final path, by which a config.json may say where the tokenizer is.
    """
    cfg = model.cfg
    format = format_of(cfg)
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in model.state_dict().items()}
    texts = format.texts(cfg, state[HEAD].dtype, tokenizer, home)
    for name, text in (texts | ({} if tokenizer is None else {TOKENIZER: tokenizer})).items():
        files.replace(folder / name, text)
    tensors = {name: tensor.contiguous() for name, tensor in format.tensors(cfg, state).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
