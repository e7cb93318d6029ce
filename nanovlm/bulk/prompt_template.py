"""A prompt that differs from image to image: {tags} from the .txt beside it, {name} and {folder} from its path."""

import re
from pathlib import Path

from nanovlm.errors import ImageError, UsageError

TAGS = "{tags}"
TAGS_EXTENSION = ".txt"
PLACEHOLDER = re.compile(r"\{(\w*)\}")
KNOWN = ("tags", "name", "folder")


def check_template(template: str) -> None:
    """Raise UsageError for a placeholder that is not known."""
    for name in PLACEHOLDER.findall(template):
        if name not in KNOWN:
            raise UsageError(f"prompt template {template!r}: {{{name}}} is none of {{tags}}, {{name}} and {{folder}}")


def fill_template(template: str, image: str) -> str:
    """The prompt for an image. Raises ImageError if it asks for tags and there are none."""
    path = Path(image)
    values = {"name": path.stem, "folder": path.absolute().parent.name}
    if TAGS in template:
        values["tags"] = _read_tags(path.with_suffix(TAGS_EXTENSION))
    return PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _read_tags(path: Path) -> str:
    if not path.is_file():
        raise ImageError(f"{path.name} is missing, so the prompt has no {TAGS}; write it, or an empty file")
    try:
        return " ".join(path.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError:
        raise ImageError(f"{path.name} is not UTF-8 text; convert it") from None
