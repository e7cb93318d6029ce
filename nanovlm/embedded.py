"""The model that ships with the package: its folder, an image it can describe, and the default prompt."""

import os
from pathlib import Path

EMBEDDED = Path(__file__).parent / "assets"  # a checkpoint folder like any other
SAMPLE = EMBEDDED / "sample.png"
PROMPT = "Describe this picture."
EMBEDDED_LIMITS = (
    "the embedded model knows only drawn scenes of colored shapes; its captions of photographs are nonsense"
)


def trained_prompts(folder: str | os.PathLike) -> list[str] | None:
    """The prompts for captions that a model's card names as the only ones it was trained on; None if it names none."""
    card = Path(folder, "README.md")
    if not card.is_file():
        return None
    from huggingface_hub import metadata_load

    try:
        prompts = (metadata_load(card) or {}).get("trained_prompts")
    except Exception:  # the card of any model, whose YAML may be damaged
        return None
    return prompts if isinstance(prompts, list) else None
