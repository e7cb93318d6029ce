"""Captions of many images: a text file beside each, or a row of a .jsonl table. A second run captions what is missing.

>>> from nanovlm import Captioner
>>> from nanovlm.bulk import Table, caption_files
>>> caption_files(Captioner.from_pretrained("owner/name"), ["photos"], Table("photos/metadata.jsonl"))
"""

import glob
import json
import logging
import os
import sys
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm.console import is_terminal, progress_bar
from nanovlm.data.file_lock import file_lock
from nanovlm.errors import ImageError, NanoVLMError, OutputError, UsageError, is_out_of_memory
from nanovlm.options import CaptionOptions
from nanovlm.processing import ANIMATION_EXTENSIONS, VIDEO_EXTENSIONS

if TYPE_CHECKING:
    from models.inference.request import Request
    from nanovlm.captioner import Captioner

logger = logging.getLogger(__name__)

NO_IMAGE_FOLDERS = {"@eaDir", "__MACOSX"}  # thumbnails of a Synology, resource forks of macOS archives
WEIGHTS = "model.safetensors"  # of a model folder, whose images are reports
LOG_INTERVAL = 30.0  # seconds between progress lines where there is no terminal


@dataclass
class Report:
    """Counts and names of a finished run."""

    images: list[str] = field(default_factory=list)
    captioned: int = 0
    skipped: list[str] = field(default_factory=list)  # images that had captions
    others: Counter[str] = field(default_factory=Counter)  # of these, captions by another model or prompt
    failed: dict[str, str] = field(default_factory=dict)  # reason by image or name
    cut: dict[str, list[str]] = field(default_factory=dict)  # images by the reason that cut their captions
    left_out: Counter[str] = field(default_factory=Counter)  # images that cannot be read here, by extension
    seconds: float = 0.0

    def fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason = " ".join(reason.split()).removeprefix(f"{name}: ")
        logger.warning("%s: %s", name if name.isprintable() else repr(name), reason)


# ----------------------------------------------------------------------------------------------------------- inputs


def extensions(options: CaptionOptions) -> Collection[str]:
    """Extensions of the files to caption in a folder."""
    if options.as_video:
        return VIDEO_EXTENSIONS | ANIMATION_EXTENSIONS
    from nanovlm.processing.image_loading import readable_extensions

    return readable_extensions()


def find_images(names: Iterable[str | os.PathLike[str]], wanted: Collection[str], report: Report) -> None:
    """Add to the report the images that files, folders and patterns name, each once, sorted within each folder.

    A file that is named is an image, whatever its extension. Hidden files and folders, model folders and folders of
    thumbnails are left out. A name that gives no image fails.
    """
    known: set[str] = set()
    for name in [os.fspath(name) for name in names]:
        matches = [name] if os.path.lexists(name) else sorted(glob.glob(name, recursive=True))
        n_before = len(report.images) + len(report.failed)
        for match in matches:
            for path in _walk(match, wanted, report) if os.path.isdir(match) else [match]:
                if (key := _key(path)) not in known:
                    report.images.append(path)
                    known.add(key)
        if not matches:
            report.fail(name, "no image matches" if glob.has_magic(name) else "No such file or directory")
        elif os.path.isdir(name) and len(report.images) + len(report.failed) == n_before:
            report.fail(name, "a folder without images")


def _walk(folder: str, wanted: Collection[str], report: Report) -> Iterator[str]:
    from nanovlm.processing.image_loading import IMAGE_EXTENSIONS

    seen: set[str] = set()  # links may lead to a folder twice
    for current, folders, files in os.walk(
        folder, onerror=lambda error: report.fail(error.filename, str(error.strerror)), followlinks=True
    ):
        real = os.path.realpath(current)
        is_model = current != folder and WEIGHTS in files
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in NO_IMAGE_FOLDERS)
        if real in seen or is_model:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted(name for name in files if name[0] != "."):
            extension = os.path.splitext(name)[1].lower()
            if extension in wanted:
                yield os.path.join(current, name)
            elif extension in IMAGE_EXTENSIONS:
                report.left_out[extension] += 1


def _key(path: str | os.PathLike[str], folder: str = "") -> str:
    """A path relative to a folder, equal for NFC and NFD names; a link to an image is an image of its own."""
    parent, name = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(parent), name)
    return unicodedata.normalize("NFC", Path(os.path.relpath(real, os.path.realpath(folder or "/"))).as_posix())


# ---------------------------------------------------------------------------------------------------------- outputs


class Sidecars:
    """Captions in text files beside their images."""

    def __init__(self, extension: str = ".txt", overwrite: bool = False):
        self.extension = extension if extension.startswith(".") else f".{extension}"
        self.overwrite = overwrite
        self.owners: dict[str, str] = {}  # image by text file

    def target(self, image: str) -> Path:
        return Path(image).with_suffix(self.extension)

    def locks(self, folders: Sequence[str]) -> list[Path]:
        return [Path(folder, ".captions.lock") for folder in folders]

    def open(self) -> None:
        """Nothing: each text file is opened when it is written."""

    def refusal(self, image: str) -> str:
        """Why no caption of this image can be written; empty if it can."""
        target = self.target(image)
        owner = self.owners.setdefault(_key(target), image)
        if _key(target) == _key(image):
            return "its caption would replace it; rename it, or write a table by --out captions.jsonl"
        return f"{target.name} is the caption of {Path(owner).name}; rename one of them" if owner != image else ""

    def row(self, image: str) -> dict[str, Any]:
        """The caption that an image has; an empty file is none."""
        try:
            text = self.target(image).read_text("utf-8", "replace").strip()
        except OSError:
            return {}
        return {"text": text} if text else {}

    def write(self, image: str, row: dict[str, Any]) -> None:
        if not self.overwrite and self.row(image):
            logger.warning("%s was written by somebody else during this run; it is kept", self.target(image))
        else:
            _write_whole(self.target(image), f"{row['text']}\n")

    def finish(self) -> None:
        """Nothing: each text file is whole."""


class Table:
    """Captions in the rows of a .jsonl file, named relative to its folder, as `load_dataset("imagefolder")` reads them.

    Rows of other images and other columns stay. A caption is appended; at the end of the run it moves into the row
    that it completes or, with overwrite, replaces.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False):
        self.path, self.overwrite = Path(path), overwrite
        self.written: set[str] = set()  # keys of images

    def target(self, image: str) -> Path:
        return self.path

    def locks(self, folders: Sequence[str]) -> list[Path]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return [self.path.with_name(f".{self.path.name}.lock")]

    def open(self) -> None:
        """Read the rows, and cut off a line that a killed run left unfinished."""
        with open(self.path, "ab+") as file:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):
                try:
                    json.loads(lines[-1])
                    file.write(b"\n")
                except ValueError:
                    logger.warning("%s: removed its unfinished last line", self.path)
                    file.truncate(sum(map(len, lines[:-1])))
        self.rows = {self.key(row): row for row in self.read() if row.get("text")}
        if not self.path.stat().st_size:
            self.path.unlink()  # no caption may follow

    def read(self) -> list[dict[str, Any]]:
        rows = []
        for number, line in enumerate(self.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            with suppress(ValueError):
                if not line.strip():
                    continue
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("file_name"), str):
                    rows.append(row)
                    continue
            raise UsageError(f"{self.path}, line {number}, is no row with a file_name; name another file")
        return rows

    def key(self, row: dict[str, Any]) -> str:
        return _key(self.path.parent / row["file_name"], str(self.path.parent))

    def refusal(self, image: str) -> str:
        return ""

    def row(self, image: str) -> dict[str, Any]:
        return self.rows.get(_key(image, str(self.path.parent)), {})

    def write(self, image: str, row: dict[str, Any]) -> None:
        key = _key(image, str(self.path.parent))
        name = Path(os.path.relpath(image, self.path.parent)).as_posix()
        with open(self.path, "ab", buffering=0) as file:  # one write: a kill leaves a whole line, or the last one torn
            file.write(_json_line({"file_name": name} | row))
        self.rows[key] = row
        self.written.add(key)

    def finish(self) -> None:
        """Merge each new caption into the older row of its image, if that has no text or is to be overwritten."""
        rows = self.read() if self.path.exists() else []
        merged: list[dict[str, Any]] = []
        first: dict[str, dict[str, Any]] = {}
        for row in rows:
            old = first.setdefault(key := self.key(row), row)
            if old is not row and (not old.get("text") or (self.overwrite and key in self.written)):
                old |= row | {"file_name": old["file_name"]}
            else:
                merged.append(row)
        if len(merged) < len(rows):
            _write_whole(self.path, b"".join(map(_json_line, merged)).decode())


class Stream(Sidecars):
    """JSON lines on standard output."""

    def locks(self, folders: Sequence[str]) -> list[Path]:
        return []

    def target(self, image: str) -> Path:
        return Path("standard output")

    def refusal(self, image: str) -> str:
        return ""

    def row(self, image: str) -> dict[str, Any]:
        return {}

    def write(self, image: str, row: dict[str, Any]) -> None:
        print(json.dumps({"image": image} | row), flush=True)


def _write_whole(path: Path, text: str) -> None:
    """Replace a file at once; no mode is set, which some drives refuse."""
    part = path.with_name(f".{path.name}.tmp")
    try:
        part.write_bytes(text.encode())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _json_line(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a file name that is not valid Unicode
        return json.dumps(row).encode() + b"\n"


# -------------------------------------------------------------------------------------------------------------- run


def caption_files(
    captioner: "Captioner | Callable[[], Captioner]",
    names: Sequence[str | os.PathLike[str]],
    output: Sidecars | Table | None = None,
    options: CaptionOptions | None = None,
    *,
    model: str = "",
    batch_size: int = 16,
) -> Report:
    """Caption the images that files, folders and patterns name, and write each caption as soon as it is there.

    Images that have a caption are skipped, so the same call resumes a run that was killed; output.overwrite captions
    them again. An image that fails is reported, and the next run tries it again. captioner may be a function that loads
    one: it is called only if there is work. model is its name, which a table keeps with each caption.
    """
    output, options, report = output or Sidecars(), options or CaptionOptions(), Report()
    find_images(names, extensions(options), report)
    folders = {os.path.realpath(name): os.fspath(name) for name in names if os.path.isdir(name)} or {"": "."}
    origin = ({"model": model} if model else {}) | ({"prompt": options.prompts[0]} if len(options.prompts) == 1 else {})
    with ExitStack() as stack:
        try:
            for lock in output.locks(list(folders.values())):
                stack.enter_context(file_lock(lock, str(lock.parent)))
            output.open()
        except OSError as error:
            raise UsageError(f"{output.target('')}: {error.strerror}; name a file elsewhere by --out") from None
        todo = []
        for image in report.images:
            if reason := output.refusal(image):
                report.fail(image, reason)
            elif output.overwrite or not (row := output.row(image)):
                todo.append(image)
            else:
                report.skipped.append(image)
                other = [f"{key} {row[key]!r}" for key in origin if row.get(key, origin[key]) != origin[key]]
                report.others.update([", ".join(other)] if other else [])
        if todo:
            loaded = captioner() if callable(captioner) else captioner
            _caption(loaded, todo, output, options, report, origin, batch_size)
        output.finish()
    return report


def _caption(
    captioner: "Captioner",
    images: Sequence[str],
    output: Sidecars | Table,
    options: CaptionOptions,
    report: Report,
    origin: dict[str, str],
    batch_size: int,
) -> None:
    """Caption images and write their rows, with a bar on a terminal and log lines elsewhere."""
    started = logged = time.monotonic()
    is_shared = isinstance(output, Stream) and is_terminal(sys.stdout)  # lines and bar would mix
    bar = progress_bar(len(images), "image", is_hidden=is_shared)
    image, resume = images[0], "run the same command to " + ("start over" if output.overwrite else "resume")
    with bar, closing(caption_rows(captioner, zip(images, images), options, batch_size)) as rows:
        try:
            for image, row in zip(images, rows):
                if isinstance(row, Exception):
                    report.fail(image, str(row) or "not enough memory")
                else:
                    output.write(image, row | origin)
                    report.captioned += 1
                    if (reason := row["finish_reason"]) != "stop":
                        report.cut.setdefault(reason, []).append(image)
                bar.update()
                now = time.monotonic()
                report.seconds = now - started
                if bar.disable and now - logged >= LOG_INTERVAL:
                    logged, done = now, report.captioned + len(report.failed)
                    minutes = report.seconds / done * (len(images) - done) / 60
                    logger.info("%d of %d images, %.0f minutes left", done, len(images), minutes)
        except KeyboardInterrupt:
            logger.warning("stopped after %d of %d images; %s", report.captioned, len(images), resume)
            raise
        except BrokenPipeError:  # the reader of a stream has left, as `head` does
            raise
        except OSError as error:
            so_far = f"{report.captioned} of {len(images)} captions are written"
            raise OutputError(f"{output.target(image)}: {error.strerror or error}; {so_far}; {resume}") from error


def caption_rows(
    captioner: "Captioner", images: Iterable[tuple[str, Any]], options: CaptionOptions, batch_size: int = 16
) -> Generator[dict[str, Any] | Exception, None, None]:
    """Yield the row of each image by name, or its error, in order; threads read some of the images ahead.

    A row has text, finish_reason, and columns for choices, several prompts or a schema's properties. Errors are those
    of an image, its file or its size; any other is raised.
    """
    if options.choices:
        for name, image in images:
            try:
                best = captioner.classify(image, options.choices, options.prompts[0])[0]
                yield _row(name, best.text, "stop", options) | best.columns()
            except Exception as error:
                yield _error_of_image(error)
        return
    n_prompts = len(options.prompts)
    with closing(_requests(captioner, images, options, 2 * batch_size)) as requests:
        answered = chain.from_iterable(
            # a first answer soon, and more at once as their number grows
            captioner.run(islice(requests, n * n_prompts) if n < batch_size else requests, n * n_prompts)
            for n in (*(2**i for i in range(batch_size.bit_length()) if 2**i < batch_size), batch_size)
        )
        while group := list(islice(answered, n_prompts)):
            try:
                yield _answer_row(captioner, group, options)
            except Exception as error:
                yield _error_of_image(error)


def _requests(
    captioner: "Captioner", images: Iterable[tuple[str, Any]], options: CaptionOptions, n_ahead: int
) -> Generator["Request", None, None]:
    """A request for each prompt about each image, which threads read and preprocess n_ahead."""
    from models.inference.request import Request

    def read(name: str, image: Any) -> list[Request]:
        try:
            if options.as_video:
                from nanovlm.processing.video import Video

                image = Video.read(image, options.max_frames)
            elif isinstance(image, str) and os.path.exists(image) and not os.path.isfile(image):
                raise ImageError(f"{image}: not a file")  # opening a pipe may block forever
            requests = captioner.requests(image, options.prompts, options)
        except Exception as error:
            return [Request((), name=name, error=error) for _ in options.prompts]
        for request in requests:
            request.name = name
        return requests

    threads = ThreadPoolExecutor()
    try:
        ahead: deque[Any] = deque()
        for name, image in images:
            ahead.append(threads.submit(read, name, image))
            if len(ahead) > n_ahead:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _answer_row(captioner: "Captioner", requests: Sequence["Request"], options: CaptionOptions) -> dict[str, Any]:
    """The row of an image whose requests, one for each prompt, have ended. Raises their errors."""
    values = [captioner.answer(request, options) for request in requests]
    texts = [captioner.text(request, options).strip() for request in requests]
    if not any(text.removeprefix(options.start_with.rstrip()).strip() for text in texts):
        raise ImageError("the model's caption is empty")
    reason = next((str(request.finished) for request in requests if request.finished != "stop"), "stop")
    columns = dict(zip(options.prompts, texts))
    if len(texts) > 1:
        return _row(requests[0].name, json.dumps(columns, ensure_ascii=False), reason, options) | columns
    properties = values[0] if options.schema is not None and isinstance(values[0], dict) else {}
    return _row(requests[0].name, texts[0], reason, options) | properties


def _row(name: str, text: str, reason: str, options: CaptionOptions) -> dict[str, Any]:
    folder = Path(name if "://" in name else os.path.abspath(name)).parent.name
    return {"text": options.prefix.replace("{folder}", folder) + text, "finish_reason": reason}


def _error_of_image(error: Exception) -> Exception:
    """The error, if it concerns one image; any other is a bug, and raised."""
    if isinstance(error, (NanoVLMError, OSError)) or is_out_of_memory(error):
        return error
    raise error
