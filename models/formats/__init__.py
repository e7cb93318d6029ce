"""Checkpoint formats beside nanoVLM's own: importing this package lets `models.checkpoint` read them.

A new format is a file here, a line below, and for images and prompts a layout in `nanovlm.processing.layouts`.
"""

from models.checkpoint import FORMATS
from models.formats.smolvlm import SmolVLM
from models.formats.visionpsy import VisionPsy

FORMATS.update(  # by model_type of config.json; nanoVLM's own has none
    idefics3=SmolVLM, smolvlm=SmolVLM, visionpsynano=VisionPsy, visionpsy=VisionPsy
)
