"""How images and prompts are laid out: one file, and one line in LAYOUTS, for each format of `models.formats`."""

from models import imported
from models.config import VLMConfig
from nanovlm.processing.layouts.nanovlm import Grid, Layout

__all__ = ["LAYOUTS", "Grid", "Layout", "layout_of"]

LAYOUTS = {  # by a format's name, where its layout is; others than the model's are not imported
    "nanovlm": "nanovlm.processing.layouts.nanovlm:Layout",
    "smolvlm": "nanovlm.processing.layouts.smolvlm:SmolVLMLayout",
    "visionpsy": "nanovlm.processing.layouts.visionpsy:VisionPsyLayout",
}


def layout_of(cfg: VLMConfig) -> Layout:
    """The layout that a model was trained with."""
    return imported(LAYOUTS[cfg.format_name])(cfg)
