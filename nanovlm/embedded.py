"""The model that ships with the package: its folder, an image it can describe, and the default prompt."""

import json
import os
from pathlib import Path

EMBEDDED = Path(__file__).parent / "assets"  # a checkpoint folder like any other
SAMPLE = EMBEDDED / "sample.png"
PROMPT = "Describe this picture."
SETTINGS = "nanovlm.json"  # beside a model's config.json, whose keys stock nanoVLM would not ignore
EMBEDDED_LIMITS = (
    "the embedded model knows only drawn scenes of colored shapes; its captions of photographs are nonsense"
)


def default_prompt(folder: str | os.PathLike[str]) -> str:
    """The prompt that the model in folder was trained to answer, if its nanovlm.json has one; else PROMPT.

    CheckpointError for a file that cannot be read.
    """
    from models.checkpoint import read_object  # here, as it imports torch

    path = Path(folder, SETTINGS)
    prompt = read_object(path).get("prompt") if path.exists() else None
    return prompt if isinstance(prompt, str) and prompt.strip() else PROMPT


def write_prompt(folder: str | os.PathLike[str], prompt: str) -> None:
    """Make the prompt the default of the model in folder."""
    from models.common import files

    files.replace(Path(folder, SETTINGS), json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n")
