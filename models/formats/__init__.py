"""Checkpoint formats beside nanoVLM's own: importing this package lets `models.checkpoint` read them.

A new format is a file here, a function and its names below, and for images and prompts a layout in
`nanovlm.processing.layouts`.
"""

from models.checkpoint import FORMATS, Format


def _smolvlm() -> type[Format]:
    from models.formats.smolvlm import SmolVLM

    return SmolVLM


def _visionpsy() -> type[Format]:
    from models.formats.visionpsy import VisionPsy

    return VisionPsy


FORMATS.update(  # by model_type of config.json; nanoVLM's own has none
    idefics3=_smolvlm, smolvlm=_smolvlm, visionpsynano=_visionpsy, visionpsy=_visionpsy
)
