"""Options and results of captioning many images."""

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovlm.embedded import PROMPT
from nanovlm.errors import UsageError
from nanovlm.options import GenerationOptions, check_positive
from nanovlm.processing import ANIMATION_EXTENSIONS, MAX_FRAMES, VIDEO_EXTENSIONS
from nanovlm.processing.image_loading import IMAGE_EXTENSIONS, readable_extensions

EXISTING = ("skip", "overwrite")
FAILURES = "failures.jsonl"  # the end of the name of a list of images without a caption
SIDECARS, STREAM = "txt", "-"


@dataclass(frozen=True)
class BulkOptions(GenerationOptions):
    """What to generate for each image: prompts, `GenerationOptions`, and how many images together.

    Of several prompts a caption is a JSON object with each one's answer.
    """

    prompt: str | tuple[str, ...] = PROMPT
    batch_size: int | None = None  # images decoded at once, per worker; None: see `BulkCaptioner`
    as_video: bool = False  # video files and animated images, each described as a whole, instead of images
    max_frames: int = MAX_FRAMES  # of a video

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive({"batch size": self.batch_size, "max_frames": self.max_frames})
        if self.schema is not None and not isinstance(self.prompt, str):
            raise UsageError(f"{len(self.prompt)} prompts with a JSON schema, which is for one; ask one")

    @property
    def extensions(self) -> Collection[str]:
        """Those of the files that are captioned of a folder."""
        return VIDEO_EXTENSIONS | ANIMATION_EXTENSIONS if self.as_video else readable_extensions()

    @property
    def prompts(self) -> Sequence[str]:
        """What is asked about each image."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True)
class OutputOptions:
    """Where captions are written, and what happens to captions that exist already."""

    # "txt": a .txt beside each image; "-": JSON lines on standard output; else a .jsonl file
    out: str | os.PathLike[str] = SIDECARS
    existing: str = "skip"
    prefix: str = ""
    extension: str = ".txt"  # of the files beside images
    name_key: str = "file_name"  # in JSON lines on standard output; tables have file_name
    columns: tuple[str, ...] = ()  # of a table, for these keys of captions that are JSON objects

    def __post_init__(self) -> None:
        if self.existing not in EXISTING:
            raise UsageError(f"existing={self.existing!r} is none of {', '.join(EXISTING)}")
        try:
            self.prefix.encode()
        except UnicodeEncodeError:
            raise UsageError(f"prefix {self.prefix!r} is not valid Unicode; correct it") from None
        if self.table is not None:
            _check_table(self.table)
        if self.extension != ".txt":
            self._check_extension()
        if self.is_stream and self.existing != "skip":
            raise UsageError(f"existing={self.existing!r} is for files; standard output holds no captions")

    @property
    def table(self) -> Path | None:
        """The file that all captions go into; None for files beside images and for standard output."""
        return None if self.out in (SIDECARS, STREAM) else Path(self.out)

    @property
    def is_stream(self) -> bool:
        """Whether captions are printed on standard output."""
        return self.out == STREAM

    @property
    def way_on(self) -> str:
        """What to do after a run that was stopped."""
        return "run the same command to " + ("resume" if self.existing == "skip" else "start over")

    def _check_extension(self) -> None:
        if self.out != SIDECARS:
            raise UsageError(
                f"extension {self.extension!r} is for a file beside each image, not for {self.out}; omit it"
            )
        if not re.fullmatch(r"\.[^/\\\0]*[^/\\\0.]", self.extension):
            raise UsageError(f"extension {self.extension!r} is not like .txt or .caption")
        if os.path.splitext(f"a{self.extension}")[1].lower() in readable_extensions() | IMAGE_EXTENSIONS:
            raise UsageError(f"extension {self.extension!r} is that of images; use .txt or .caption")

    def fields(self, text: str) -> dict[str, Any]:
        """The values of `columns` in the text of a caption."""
        value = json.loads(text) if self.columns else None
        return {name: value.get(name) for name in self.columns} if isinstance(value, dict) else {}

    def decorate(self, caption: str) -> str:
        """The caption as it is written."""
        return f"{self.prefix}{caption.strip()}"


def _check_table(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise UsageError(f"output {os.fspath(path)!r} must be a .jsonl file, {SIDECARS} or {STREAM}")
    if path.name.endswith(FAILURES):
        raise UsageError(f"output {path} is named like a list of images that failed; choose another name")


@dataclass(frozen=True)
class BulkReport:
    """The results of a run."""

    captioned: int
    already_done: int
    remaining: int  # images that a limit left for the next run
    failed: int
    empty: int  # of the failed, images for which the model's caption was empty
    left_out: dict[str, int]  # images that cannot be read here, by extension
    failures: Path | str | None  # the file that lists them, or its URI
    repeated: int = 0  # captions that were ended because they repeated themselves
    seconds: float = 0.0  # spent on captioning
    utilization: float = 0.0  # share of that time in which the model ran, mean over workers; unknown on a cluster

    @property
    def per_minute(self) -> float:
        return 60 * self.captioned / self.seconds if self.seconds else 0.0
