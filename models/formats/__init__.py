"""Checkpoint formats beside nanoVLM's own: importing this package lets `models.checkpoint` read them.

A new format is a file here and its lines below, and for images and prompts a layout in `nanovlm.processing.layouts`.
"""

from functools import partial

from models import imported
from models.checkpoint import FORMATS

SMOLVLM = partial(imported, "models.formats.smolvlm:SmolVLM")
VISIONPSY = partial(imported, "models.formats.visionpsy:VisionPsy")
FORMATS.update(  # by model_type of config.json; nanoVLM's own has none
    idefics3=SMOLVLM, smolvlm=SMOLVLM, visionpsynano=VISIONPSY, visionpsy=VISIONPSY
)
