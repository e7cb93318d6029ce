"""How images and prompts are laid out: one file, and one line in LAYOUTS, for each format of `models.formats`."""

from models.config import VLMConfig
from nanovlm.processing.layouts.base import Grid
from nanovlm.processing.layouts.nanovlm import Layout
from nanovlm.processing.layouts.smolvlm import SmolVLMLayout
from nanovlm.processing.layouts.visionpsy import VisionPsyLayout

__all__ = ["LAYOUTS", "Grid", "Layout", "layout_of"]

LAYOUTS: dict[str, type[Layout]] = {"nanovlm": Layout, "smolvlm": SmolVLMLayout, "visionpsy": VisionPsyLayout}


def layout_of(cfg: VLMConfig) -> Layout:
    """The layout that a model was trained with."""
    return LAYOUTS[cfg.format_name](cfg)
