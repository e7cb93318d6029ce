"""Captions of many images, in a text file beside each or in a .jsonl table. A second run captions what is missing."""

import glob
import json
import logging
import os
import sys
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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

Row = dict[str, Any]
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


def extensions(options: CaptionOptions) -> Collection[str]:
    """Extensions of the files to caption in a folder."""
    from nanovlm.processing.image_loading import readable_extensions

    return VIDEO_EXTENSIONS | ANIMATION_EXTENSIONS if options.as_video else readable_extensions()


def find_images(names: Iterable[str | os.PathLike[str]], wanted: Collection[str], report: Report) -> None:
    """Add to the report the images that files, folders and patterns name, each once, sorted within each folder.

    A file that is named is an image, whatever its extension. Hidden files and folders, model folders and folders of
    thumbnails are left out. A name that gives no image fails.
    """
    images: dict[str, str] = {}  # by key
    for name in [os.fspath(name) for name in names]:
        matches = [name] if os.path.lexists(name) else sorted(glob.glob(name, recursive=True))
        walks = (_walk(match, wanted, report) if os.path.isdir(match) else [match] for match in matches)
        found = list(chain.from_iterable(walks))
        for path in found:
            images.setdefault(_key(path), path)
        if not matches:
            report.fail(name, "no image matches" if glob.has_magic(name) else "No such file or directory")
        elif not found and name not in report.failed:
            report.fail(name, "a folder without images")
    report.images += images.values()


def _walk(folder: str, wanted: Collection[str], report: Report) -> Iterator[str]:
    from nanovlm.processing.image_loading import IMAGE_EXTENSIONS

    def fail(error: OSError) -> None:
        report.fail(error.filename, str(error.strerror))

    seen: set[str] = set()  # links may lead to a folder twice
    for current, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(current)
        if real in seen or (current != folder and WEIGHTS in files):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in NO_IMAGE_FOLDERS)
        for name in sorted(name for name in files if name[0] != "."):
            extension = os.path.splitext(name)[1].lower()
            if extension in wanted:
                yield os.path.join(current, name)
            elif extension in IMAGE_EXTENSIONS:
                report.left_out[extension] += 1


def _key(path: str | os.PathLike[str], folder: str | os.PathLike[str] = "/") -> str:
    """A path relative to a folder, equal for NFC and NFD names; a link to an image is an image of its own."""
    parent, name = os.path.split(os.path.abspath(path))
    relative = os.path.relpath(os.path.join(os.path.realpath(parent), name), os.path.realpath(folder))
    return unicodedata.normalize("NFC", Path(relative).as_posix())


class Stream:
    """JSON lines on standard output; the base of outputs that keep captions."""

    overwrite = False

    def target(self, image: str) -> Path:
        """The file of an image's caption."""
        return Path("standard output")

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        """Lock the output during a run over folders, and read what it holds; OSError if that is not possible."""
        yield

    def refusal(self, image: str) -> str:
        """Why no caption of this image can be written; empty if it can."""
        return ""

    def row(self, image: str) -> Row:
        """Row of an image that has a caption."""
        return {}

    def write(self, image: str, row: Row) -> None:
        print(json.dumps({"image": image} | row), flush=True)


class Sidecars(Stream):
    """Captions in text files beside their images."""

    def __init__(self, extension: str = ".txt", overwrite: bool = False):
        self.extension = extension if extension.startswith(".") else f".{extension}"
        self.overwrite = overwrite
        self.owners: dict[str, str] = {}  # image by text file

    def target(self, image: str) -> Path:
        return Path(image).with_suffix(self.extension)

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for folder in folders:
                stack.enter_context(file_lock(Path(folder, ".captions.lock"), folder))
            yield

    def refusal(self, image: str) -> str:
        target = self.target(image)
        owner = self.owners.setdefault(_key(target), image)
        if _key(target) == _key(image):
            return "its caption would replace it; rename it, or write a table by --out captions.jsonl"
        return f"{target.name} is the caption of {Path(owner).name}; rename one of them" if owner != image else ""

    def row(self, image: str) -> Row:
        """The caption that an image has; an empty file is none."""
        with suppress(OSError):
            if text := self.target(image).read_text("utf-8", "replace").strip():
                return {"text": text}
        return {}

    def write(self, image: str, row: Row) -> None:
        if not self.overwrite and self.row(image):
            logger.warning("%s was written by somebody else during this run; it is kept", self.target(image))
        else:
            _write_whole(self.target(image), f"{row['text']}\n".encode())


class Table(Stream):
    """Captions in the rows of a .jsonl file, named relative to its folder, as `load_dataset("imagefolder")` reads them.

    Rows of other images and other columns stay. A caption is appended; at the end of the run it moves into the row
    that it completes or, with overwrite, replaces.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False):
        self.path = Path(path)
        self.overwrite = overwrite
        self.rows: dict[str, Row] = {}  # those with a text, by key
        self.written: set[str] = set()  # keys of images

    def target(self, image: str) -> Path:
        return self.path

    @contextmanager
    def opened(self, folders: Sequence[str]) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self.path.with_name(f".{self.path.name}.lock"), str(self.path.parent)):
            with open(self.path, "ab+") as file:  # a table that cannot be written fails before any work
                file.seek(0)
                last = file.read().rpartition(b"\n")[2]
                try:
                    file.write(b"\n" if last and json.loads(last) else b"")
                except ValueError:
                    logger.warning("%s: removed its unfinished last line", self.path)
                    file.truncate(file.tell() - len(last))
            rows = self.read()
            self.rows = {self.key(row["file_name"]): row for row in rows if row.get("text")}
            if not rows:
                self.path.unlink()  # no caption may follow
            yield
            if self.path.exists():
                self.merge()

    def read(self) -> list[Row]:
        rows = []
        lines = self.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        for number, line in enumerate(lines, start=1):
            row = None
            with suppress(ValueError):
                row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("file_name"), str):
                rows.append(row)
            elif line.strip():
                raise UsageError(f"{self.path}, line {number}, is no row with a file_name; name another file")
        return rows

    def key(self, name: str | os.PathLike[str]) -> str:
        """The key of a path as the table names it, relative to its folder."""
        return _key(self.path.parent / name, self.path.parent)

    def row(self, image: str) -> Row:
        return self.rows.get(self.key(os.path.abspath(image)), {})

    def write(self, image: str, row: Row) -> None:
        name = Path(os.path.relpath(image, self.path.parent)).as_posix()
        with open(self.path, "ab", buffering=0) as file:  # one write: a kill leaves a whole line, or the last one torn
            file.write(_json_line({"file_name": name} | row))
        self.rows[self.key(name)] = row
        self.written.add(self.key(name))

    def merge(self) -> None:
        """Move each new caption into the older row of its image, if that has no text or is to be overwritten."""
        rows = self.read()
        merged: list[Row] = []
        first: dict[str, Row] = {}
        for row in rows:
            old = first.setdefault(key := self.key(row["file_name"]), row)
            if old is not row and (not old.get("text") or (self.overwrite and key in self.written)):
                old |= row | {"file_name": old["file_name"]}
            else:
                merged.append(row)
        if len(merged) < len(rows):
            _write_whole(self.path, b"".join(map(_json_line, merged)))


def _write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once; no mode is set, which some drives refuse."""
    part = path.with_name(f".{path.name}.tmp")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _json_line(row: Row) -> bytes:
    text = json.dumps(row, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # \udcff in a file's name is JSON's escape, too


def caption_files(
    captioner: "Captioner | Callable[[], Captioner]",
    names: Sequence[str | os.PathLike[str]],
    output: Stream | None = None,
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
    output = output or Sidecars()
    options = options or CaptionOptions()
    report = Report()
    find_images(names, extensions(options), report)
    folders = {os.path.realpath(name): os.fspath(name) for name in names if os.path.isdir(name)} or {"": "."}
    origin = {"model": model} if model else {}
    origin |= {"prompt": options.prompts[0]} if len(options.prompts) == 1 else {}
    todo = []
    with ExitStack() as stack:
        try:
            stack.enter_context(output.opened(list(folders.values())))
        except OSError as error:
            raise UsageError(f"{output.target('')}: {error.strerror}; name a file elsewhere by --out") from None
        for image in report.images:
            row = output.row(image)
            if reason := output.refusal(image):
                report.fail(image, reason)
            elif output.overwrite or not row:
                todo.append(image)
            else:
                report.skipped.append(image)
                if other := [f"{key} {row[key]!r}" for key in origin if row.get(key, origin[key]) != origin[key]]:
                    report.others[", ".join(other)] += 1
        if todo:
            rows = caption_rows(captioner() if callable(captioner) else captioner, zip(todo, todo), options, batch_size)
            _write_rows(todo, stack.enter_context(closing(rows)), output, report, origin)
    return report


def _write_rows(
    images: Sequence[str], rows: Iterator[Row | Exception], output: Stream, report: Report, origin: Row
) -> None:
    """Write the row of each image when it is there, with a bar on a terminal and log lines elsewhere."""
    started = logged = time.monotonic()
    is_shared = type(output) is Stream and is_terminal(sys.stdout)  # lines and bar would mix
    image = images[0]
    resume = "run the same command to " + ("start over" if output.overwrite else "resume")
    try:
        with progress_bar(len(images), "image", is_hidden=is_shared) as bar:
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
                    logged = now
                    done = report.captioned + len(report.failed)
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
) -> Generator[Row | Exception, None, None]:
    """Yield the row of each image by name, or its error, in order; threads read some of the images ahead.

    A row has text, finish_reason, and columns for choices, several prompts or a schema's properties. Errors are those
    of an image, its file or its size; any other is raised.
    """
    n = len(options.prompts)
    answers: Iterator[Callable[[], Row]]
    with closing(_read_ahead(captioner, images, options, 2 * batch_size)) as requests:
        if options.choices:
            answers = (partial(_choose, captioner, name, image, options) for name, image in images)
        else:
            first = captioner.run(islice(requests, n), n)  # alone, so that the first caption comes soon
            answered = chain(first, captioner.run(requests, batch_size * n))
            groups = iter(lambda: list(islice(answered, n)), [])
            answers = (partial(_answer, captioner, group, options) for group in groups)
        for answer in answers:
            try:
                yield answer()
            except Exception as error:
                if not (isinstance(error, (NanoVLMError, OSError)) or is_out_of_memory(error)):
                    raise
                yield error


def _read_ahead(
    captioner: "Captioner", images: Iterable[tuple[str, Any]], options: CaptionOptions, n_ahead: int
) -> Generator["Request", None, None]:
    """A request for each prompt about each image, which threads read and preprocess n_ahead."""
    from models.inference.request import Request

    def read(name: str, image: Any) -> list[Request]:
        try:
            requests = captioner.requests(_source(image, options), options.prompts, options)
        except Exception as error:
            return [Request((), name=name, error=error) for _ in options.prompts]
        for request in requests:
            request.name = name
        return requests

    threads = ThreadPoolExecutor()
    ahead = deque[Future[list[Request]]]()
    try:
        for name, image in images:
            ahead.append(threads.submit(read, name, image))
            if len(ahead) > n_ahead:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _source(image: Any, options: CaptionOptions) -> Any:
    """The image or video to read; ImageError for the name of a pipe, whose opening may block forever."""
    if options.as_video:
        from nanovlm.processing.video import Video

        return Video.read(image, options.max_frames)
    if isinstance(image, str) and os.path.exists(image) and not os.path.isfile(image):
        raise ImageError(f"{image}: not a file")
    return image


def _choose(captioner: "Captioner", name: str, image: Any, options: CaptionOptions) -> Row:
    """The row of an image whose answer is one of the choices."""
    best = captioner.classify(_source(image, options), options.choices, options.prompts[0])[0]
    return _row(name, best.text, "stop", options) | best.columns()


def _answer(captioner: "Captioner", requests: Sequence["Request"], options: CaptionOptions) -> Row:
    """The row of an image whose requests, one for each prompt, have ended. Raises their errors."""
    values = [captioner.answer(request, options) for request in requests]
    texts = [captioner.text(request, options).strip() for request in requests]
    if not any(text.removeprefix(options.start_with.rstrip()).strip() for text in texts):
        raise ImageError("the model's caption is empty")
    reason = next((str(request.finished) for request in requests if request.finished != "stop"), "stop")
    columns = dict(zip(options.prompts, texts)) if len(texts) > 1 else values[0] if type(values[0]) is dict else {}
    text = json.dumps(columns, ensure_ascii=False) if len(texts) > 1 else texts[0]
    return _row(requests[0].name, text, reason, options) | columns


def _row(name: str, text: str, reason: str, options: CaptionOptions) -> Row:
    folder = Path(name if "://" in name else os.path.abspath(name)).parent.name
    return {"text": options.prefix.replace("{folder}", folder) + text, "finish_reason": reason}
