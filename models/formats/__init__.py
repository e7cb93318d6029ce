"""Checkpoint formats: one file for each layout of a model's folder, and loaders of other models' weights.

A format is a `CheckpointFormat`. `load_config` chooses one of FORMATS by config.json, and nothing asks again: what
differs is a method or an attribute of `cfg.format`. A new format is a file here, a line in FORMATS, and for images and
prompts a layout in `nanovlm.processing.layouts`.
"""

from models.config import CheckpointFormat
from models.errors import CheckpointError
from models.formats.nanovlm import NanoVLM
from models.formats.smolvlm import SmolVLM

FORMATS: tuple[type[CheckpointFormat], ...] = (NanoVLM, SmolVLM)
NANOVLM = NanoVLM()  # of a config that is made, not loaded
OTHER_FILES = tuple(dict.fromkeys(name for format in FORMATS for name in format.other_files))


def recognize(raw: dict, where: str) -> type[CheckpointFormat]:
    """The format of the object of a config.json, which `where` names in errors; CheckpointError if it is no FORMAT."""
    for format in FORMATS:
        if format.recognizes(raw):
            return format
    known = " and ".join(name for format in FORMATS for name in format.model_types)
    raise CheckpointError(
        f"{where}: model_type={raw['model_type']!r} is not supported; nanoVLM's own config.json and those of "
        f"transformers' {known} are"
    )
