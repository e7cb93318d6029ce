"""The model that ships with the package: its folder, an image it can describe, and the default prompt."""

import json
from pathlib import Path

EMBEDDED = Path(__file__).parent / "assets"  # a checkpoint folder like any other
SAMPLE = EMBEDDED / "sample.png"
PROMPT = "Describe this picture."
SETTINGS = "nanovlm.json"  # beside a model's config.json, whose keys stock nanoVLM would not ignore
EMBEDDED_LIMITS = (
    "the embedded model knows only drawn scenes of colored shapes; its captions of photographs are nonsense"
)


def default_prompt(folder: str | Path) -> str:
    """The prompt that the model in folder was trained to answer, if its nanovlm.json has one; else PROMPT."""
    try:
        prompt = json.loads(Path(folder, SETTINGS).read_text(encoding="utf-8"))["prompt"]
    except (OSError, ValueError, KeyError, TypeError):
        return PROMPT
    return prompt if isinstance(prompt, str) and prompt.strip() else PROMPT
