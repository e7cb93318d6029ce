"""A prompt that differs from image to image: {tags} from the .txt beside it, {name} and {folder} from its path, and
{column:NAME} from its row of a table."""

import re
from collections.abc import Mapping
from pathlib import Path

from nanovlm.errors import ImageError, UsageError

TAGS = "{tags}"
TAGS_EXTENSION = ".txt"
COLUMN = "column:"
PLACEHOLDER = re.compile(r"\{(column:[^{}]+|\w*)\}")
KNOWN = ("tags", "name", "folder")


def check_template(template: str) -> None:
    """Raise UsageError for a placeholder that is not known."""
    for name in PLACEHOLDER.findall(template):
        if name not in KNOWN and not name.startswith(COLUMN):
            known = "{tags}, {name}, {folder} and {column:NAME}"
            raise UsageError(f"prompt template {template!r}: {{{name}}} is none of {known}")


def fill_template(template: str, image: str, row: Mapping[str, object]) -> str:
    """The prompt for an image, of which row holds columns. ImageError if it asks for what is not there."""
    path, columns = Path(image), [name for name in PLACEHOLDER.findall(template) if name.startswith(COLUMN)]
    for name in columns:
        if row.get(name.removeprefix(COLUMN)) in (None, ""):
            raise ImageError(f"its row has no {name.removeprefix(COLUMN)}, which the prompt needs; write it")
    values = {name: str(row[name.removeprefix(COLUMN)]) for name in columns}
    values |= {"name": path.stem, "folder": path.absolute().parent.name}
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
