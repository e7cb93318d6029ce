"""How images and prompts are laid out: one file, and one line in LAYOUTS, for each format of `models.formats`."""

from collections.abc import Callable

from models.config import VLMConfig
from nanovlm.processing.layouts.nanovlm import Grid, Layout

__all__ = ["LAYOUTS", "Grid", "Layout", "layout_of"]


def _smolvlm(cfg: VLMConfig) -> Layout:
    from nanovlm.processing.layouts.smolvlm import SmolVLMLayout

    return SmolVLMLayout(cfg)


def _visionpsy(cfg: VLMConfig) -> Layout:
    from nanovlm.processing.layouts.visionpsy import VisionPsyLayout

    return VisionPsyLayout(cfg)


LAYOUTS: dict[str, Callable[[VLMConfig], Layout]] = {"nanovlm": Layout, "smolvlm": _smolvlm, "visionpsy": _visionpsy}


def layout_of(cfg: VLMConfig) -> Layout:
    """The layout that a model was trained with."""
    return LAYOUTS[cfg.format_name](cfg)
