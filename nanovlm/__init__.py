"""Pictures and words: a picture becomes a caption in three lines.

>>> from nanovlm import Captioner
>>> captioner = Captioner.from_pretrained()
>>> captioner.caption("picture.png")
"""

from pathlib import Path

__version__ = "0.1.0"
__all__ = ["EMBEDDED", "PROMPT", "SAMPLE", "Captioner"]

EMBEDDED = Path(__file__).parent / "assets"  # the model that ships with the package
SAMPLE = EMBEDDED / "sample.png"
PROMPT = "Describe this picture."


def __getattr__(name: str):
    if name == "Captioner":  # on demand: importing torch takes seconds, and --help should not
        from nanovlm.captioner import Captioner

        return Captioner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
