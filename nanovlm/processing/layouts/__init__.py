"""Layouts of images and prompts, one file and one line here for each format of `models.formats`."""

from models.config import VLMConfig
from nanovlm.processing.layouts.base import Layout
from nanovlm.processing.layouts.nanovlm import NanoVLMLayout
from nanovlm.processing.layouts.smolvlm import SmolVLMLayout

LAYOUTS: dict[str, type[Layout]] = {"nanovlm": NanoVLMLayout, "smolvlm": SmolVLMLayout}


def layout_of(cfg: VLMConfig) -> Layout:
    """The layout that a model was trained with."""
    return LAYOUTS[cfg.format.name](cfg)
