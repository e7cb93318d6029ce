"""The model that ships with the package: its folder, an image it can describe, and the default prompt."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "assets"  # a checkpoint folder like any other
SAMPLE = EMBEDDED / "sample.png"
PROMPT = "Describe this picture."
EMBEDDED_LIMITS = (
    "the embedded model knows only drawn scenes of colored shapes; its captions of photographs are nonsense"
)
