"""Checkpoint formats: one file for each layout of a model's folder, and loaders of other models' weights.

A format is a `CheckpointFormat`. `load_config` chooses one by config.json, and nothing asks again: what differs is a
method or an attribute of `cfg.format`. A new format is a file here, a line in FORMATS, and for images and prompts a
layout in `nanovlm.processing.layouts`.
"""

import importlib

from models.config import CheckpointFormat
from models.errors import CheckpointError
from models.formats.nanovlm import NanoVLM

NANOVLM = NanoVLM()  # of a config that is made, not loaded
FORMATS: dict[str, tuple[str, str]] = {  # model_type in config.json -> module here and its class, imported when needed
    "idefics3": ("smolvlm", "SmolVLM"),
    "smolvlm": ("smolvlm", "SmolVLM"),
}


def format_class(model_type: str) -> type[CheckpointFormat]:
    """The format of a model_type in FORMATS."""
    module, name = FORMATS[model_type]
    return getattr(importlib.import_module(f"models.formats.{module}"), name)


def recognize(raw: dict, where: str) -> type[CheckpointFormat]:
    """The format of the object of a config.json, which `where` names in errors; CheckpointError if it is none."""
    if NanoVLM.recognizes(raw):
        return NanoVLM
    if raw["model_type"] not in FORMATS:
        raise CheckpointError(
            f"{where}: model_type={raw['model_type']!r} is not supported; nanoVLM's own config.json and those of "
            f"transformers' {' and '.join(FORMATS)} are"
        )
    return format_class(raw["model_type"])


def other_files() -> list[str]:
    """Names of all files of all formats beside config.json, weights and tokenizer.json."""
    formats: list[type[CheckpointFormat]] = [NanoVLM, *map(format_class, FORMATS)]
    return list(dict.fromkeys(name for format in formats for name in format.other_files))
