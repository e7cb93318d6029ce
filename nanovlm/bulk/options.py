"""Options and results of captioning many images."""

import os
from dataclasses import dataclass
from pathlib import Path

from models.decoding import GREEDY, SamplingParams
from nanovlm import PROMPT
from nanovlm.data.source import INSTALL_DATA
from nanovlm.errors import UsageError

EXISTING = ("skip", "overwrite", "append", "prepend")
TABLES = (".jsonl", ".csv", ".parquet")
SIDECARS = "txt"


@dataclass(frozen=True)
class BulkOptions:
    """What to generate for each image."""

    prompt: str = PROMPT
    max_new_tokens: int = 128
    sampling: SamplingParams = GREEDY
    batch_size: int | None = None  # images decoded at once, per worker; None: see `BulkCaptioner`

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch size {self.batch_size} is less than 1")


@dataclass(frozen=True)
class OutputOptions:
    """Where captions are written, and what happens to captions that exist already."""

    out: str | os.PathLike = SIDECARS  # "txt": a .txt beside each image; else a .jsonl, .csv or .parquet file
    existing: str = "skip"
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        if self.existing not in EXISTING:
            raise UsageError(f"existing={self.existing!r} is none of {', '.join(EXISTING)}")
        for name in ("prefix", "suffix"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError:
                raise UsageError(f"{name} {getattr(self, name)!r} is not valid Unicode") from None
        if self.table is not None:
            _check_table(self.table)

    @property
    def table(self) -> Path | None:
        """The file that all captions go into; None for a .txt beside each image."""
        return None if self.out == SIDECARS else Path(self.out)

    def decorate(self, caption: str) -> str:
        """The caption as it is written."""
        return f"{self.prefix}{caption.strip()}{self.suffix}"


def _check_table(path: Path) -> None:
    if path.suffix not in TABLES:
        raise UsageError(f"output {os.fspath(path)!r} is none of {', '.join(TABLES)} or {SIDECARS}")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise UsageError(f"output {path} needs pyarrow: {INSTALL_DATA}, or use .jsonl or .csv") from None


@dataclass(frozen=True)
class BulkReport:
    """What a run did."""

    captioned: int
    already_done: int
    failed: int
    empty: int  # of the failed, images for which the model's caption was empty
    left_out: dict[str, int]  # pictures that cannot be read here, by extension
    seconds: float  # spent on captioning
    utilization: float  # share of that time in which the model ran, mean over workers
    failures: Path | None  # the file that lists them
    resume_log: Path | None  # what remembers that append or prepend was done

    @property
    def per_minute(self) -> float:
        return 60 * self.captioned / self.seconds if self.seconds else 0.0
