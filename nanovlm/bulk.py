"""Captions of the images in folders, by continuous batching. A second run captions what is missing."""

import glob
import json
import logging
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from models.common.errors import FileError
from nanovlm.console import is_terminal, printable, progress_bar
from nanovlm.errors import ImageError, NanoVLMError, OutputError, UsageError, is_out_of_memory
from nanovlm.folders import walk
from nanovlm.options import RESERVED, CaptionOptions
from nanovlm.outputs import EDITED, Output, Row, Sidecars, forget_folders, image_key, reasons, replaces
from nanovlm.outputs import Table as Table
from nanovlm.processing import ANIMATION_EXTENSIONS, VIDEO_EXTENSIONS

if TYPE_CHECKING:
    from models.inference.continuous_batching import Request
    from nanovlm.captioner import Captioner

logger = logging.getLogger(__name__)

MAX_LOCKED = 200  # folders; each takes a descriptor
LOG_INTERVAL = 30.0  # seconds between progress lines where there is no terminal


@dataclass
class Report:
    """Counts and names of a finished run."""

    images: list[str] = field(default_factory=list)
    captioned: int = 0
    skipped: list[str] = field(default_factory=list)  # images that had captions
    others: Counter[str] = field(default_factory=Counter)  # of these, captions by another model, prompt or prefix
    kept: list[str] = field(default_factory=list)  # images whose texts a person wrote or edited
    failed: dict[str, str] = field(default_factory=dict)  # reason by image or name
    cut: dict[str, list[str]] = field(default_factory=dict)  # images by the reason that cut their captions
    left_out: Counter[str] = field(default_factory=Counter)  # images that cannot be read here, by extension
    seconds: float = 0.0

    def fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason = " ".join(reason.split()).removeprefix(f"{name}: ")
        logger.warning("%s: %s", printable(name), reason)


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
            images.setdefault(image_key(path), path)
        if not matches:
            report.fail(name, "no image matches" if glob.has_magic(name) else "No such file or directory")
        elif not found and name not in report.failed:
            report.fail(name, "a folder without images")
    report.images += images.values()


def _walk(folder: str, wanted: Collection[str], report: Report) -> Iterator[str]:
    from nanovlm.processing.image_loading import IMAGE_EXTENSIONS

    for current, names in walk(folder, lambda error: report.fail(error.filename, str(error.strerror))):
        for name in names:
            extension = os.path.splitext(name)[1].lower()
            if extension in wanted:
                yield os.path.join(current, name)
            elif extension in IMAGE_EXTENSIONS:
                report.left_out[extension] += 1


def caption_files(
    captioner: "Captioner | Callable[[], Captioner]",
    names: Sequence[str | os.PathLike[str]],
    output: Output | None = None,
    options: CaptionOptions | None = None,
    *,
    model: str = "",
    batch_size: int = 16,
) -> Report:
    """Caption the images that files, folders and patterns name, and write each caption as soon as it is there.

    Images that have a caption are skipped, so the same call resumes a run that was killed. output.overwrite captions
    them again, but keeps what a person wrote or edited unless it is "all". An image that fails is reported, and the
    next run tries it again. captioner may be a function that loads one: it is called only if there is work. model is
    its name, which is kept with each caption.
    """
    output = output or Sidecars()
    options = options or CaptionOptions()
    if isinstance(output, Sidecars) and len(options.prompts) > 1:
        ways = "write a table by --out captions.jsonl, or ask by a run each"
        raise UsageError(f"a text file takes the answer to one prompt, not to {len(options.prompts)}; {ways}")
    report = Report()
    forget_folders()
    find_images(names, extensions(options), report)
    origin = partial(_origin, model, options)
    with ExitStack() as stack:
        try:
            stack.enter_context(output.opened(folders_of(names, report.images)))
        except OSError as error:
            problem = error if isinstance(error, FileError) else f"{output.target('')}: {error.strerror}"
            raise UsageError(f"{problem}; name a file elsewhere by --out") from None
        if todo := _find_work(output, report, origin):
            rows = caption_rows(captioner() if callable(captioner) else captioner, zip(todo, todo), options, batch_size)
            _write_rows(todo, stack.enter_context(closing(rows)), output, report, origin)
    return report


def folders_of(names: Sequence[str | os.PathLike[str]], images: Sequence[str]) -> list[str]:
    """The folders to lock, each once: those that are named, and those of the first images."""
    found: dict[str, str] = {}
    for folder in chain((os.fspath(name) for name in names if os.path.isdir(name)), map(os.path.dirname, images)):
        found.setdefault(os.path.realpath(folder), folder or ".")
    return list(found.values())[:MAX_LOCKED]


def _origin(model: str, options: CaptionOptions, image: str) -> Row:
    """Columns of an image's row that name model, prompt, prefix and choices of this run."""
    origin = {"model": model} if model else {}
    origin |= {"prompt": options.filled(options.prompts[0], image)} if len(options.prompts) == 1 else {}
    return origin | {"prefix": options.prefix, "choices": ",".join(options.choices)}


def _find_work(output: Output, report: Report, origin: Callable[[str], Row]) -> list[str]:
    """The images to caption; the report gets the others. OutputError if none can be written, for one reason."""
    todo = []
    reasons = {image: output.refusal(image) for image in report.images}
    if len(reasons) > 1 and len(set(reasons.values())) == 1 and (reason := reasons[report.images[0]]):
        raise OutputError(f"{report.images[0]} and all others: {reason}")
    for image, reason in reasons.items():
        row: Row = {}
        try:
            row = {} if reason else output.row(image)
        except FileError as error:
            reason = str(error)
        if reason:
            report.fail(image, reason)
        elif not row or replaces(output.overwrite, row):
            todo.append(image)
        elif output.overwrite:
            report.kept.append(image)
        else:
            report.skipped.append(image)
            if other := _differences(row, origin(image)):
                report.others[other] += 1
    return todo


def _differences(row: Row, origin: Row) -> str:
    """Columns of an earlier caption that differ from this run's, as a text; "" for a person's."""
    if "finish_reason" not in row or EDITED in reasons(row):
        return ""
    missing = origin | {"prefix": "", "choices": ""}  # a row without a model or prompt tells nothing of it
    values = {name: row.get(name, missing[name]) for name in origin}
    return ", ".join(f"{name} {value!r}" for name, value in values.items() if value != origin[name])


def _write_rows(
    images: Sequence[str], rows: Iterator[Row | Exception], output: Output, report: Report, origin: Callable[[str], Row]
) -> None:
    """Write the row of each image when it is there, with a bar on a terminal and log lines elsewhere."""
    started = logged = time.monotonic()
    is_shared = type(output) is Output and is_terminal(sys.stdout)  # lines and bar would mix
    image = images[0]
    resume = "run the same command to " + ("start over" if output.overwrite else "resume")
    try:
        with progress_bar(len(images), "image", is_hidden=is_shared) as bar:
            for image, row in zip(images, rows):
                made = {name: value for name, value in origin(image).items() if value}
                if isinstance(row, Exception):
                    report.fail(image, str(row) or "not enough memory")
                    output.fail(image, report.failed[image], made)
                else:
                    _write_row(image, row | made, output, report)
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
        problem = error if isinstance(error, FileError) else f"{output.target(image)}: {error.strerror or error}"
        raise OutputError(f"{problem}; {so_far}; {resume}") from error


def _write_row(image: str, row: Row, output: Output, report: Report) -> None:
    try:
        output.write(image, row)
    except OSError as error:
        if error.errno not in output.errors_of_one:
            raise
        report.fail(image, str(error))
        return
    report.captioned += 1
    if (reason := row["finish_reason"]) != "stop":
        report.cut.setdefault(reason, []).append(image)


def caption_rows(
    captioner: "Captioner", images: Iterable[tuple[str, Any]], options: CaptionOptions, batch_size: int = 16
) -> Generator[Row | Exception, None, None]:
    """Yield the row of each image by name, or its error, in order; threads read some of the images ahead.

    A row has text, finish_reason, and columns for choices, several prompts or a schema's properties. Errors are those
    of an image, its file or its size; any other is raised.
    """
    n = len(options.choices) or len(options.prompts)
    n_images = max(1, batch_size // n) if options.choices else batch_size  # there may be hundreds of choices
    with closing(_read_ahead(captioner, images, options, 2 * batch_size)) as requests:
        for group in captioner.run_groups(requests, n, n_images):
            try:
                yield _answer(captioner, group, options)
            except Exception as error:
                if not (isinstance(error, (NanoVLMError, OSError)) or is_out_of_memory(error)):
                    raise
                yield error


def _read_ahead(
    captioner: "Captioner", images: Iterable[tuple[str, Any]], options: CaptionOptions, n_ahead: int
) -> Generator["Request", None, None]:
    """A request for each prompt, or choice, about each image, which threads read and preprocess n_ahead."""
    from models.inference.continuous_batching import Request
    from nanovlm.processing.video import Video

    def read(name: str, image: Any) -> list[Request]:
        try:
            if options.as_video:
                image = Video.read(image, options.max_frames)
            prompts = [options.filled(prompt, name) for prompt in options.prompts]
            if options.choices:
                requests = captioner.choice_requests(image, options.choices, prompts[0])
            else:
                requests = captioner.requests(image, prompts, options)
        except Exception as error:
            return [Request((), name=name, error=error) for _ in options.choices or options.prompts]
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


def _answer(captioner: "Captioner", requests: Sequence["Request"], options: CaptionOptions) -> Row:
    """The row of an image whose requests, one for each prompt or choice, have ended. Raises their errors."""
    if options.choices:
        from nanovlm.choices import ranked_choices

        best = ranked_choices(requests)[0]
        return _row(requests[0].name, best.text, "stop", options, best.columns())
    values = [captioner.answer(request, options) for request in requests]
    texts = [captioner.text(request, options).strip() for request in requests]
    if not any(options.has_answer(text) for text in texts):
        raise ImageError("the model's caption is empty")
    reason = next((str(request.finished) for request in requests if request.finished != "stop"), "stop")
    columns = dict(zip(options.prompts, texts)) if len(texts) > 1 else values[0] if type(values[0]) is dict else {}
    text = json.dumps(columns, ensure_ascii=False) if len(texts) > 1 else texts[0]
    return _row(requests[0].name, text, reason, options, columns)


def _row(name: str, text: str, reason: str, options: CaptionOptions, columns: Row) -> Row:
    """A row; columns of a schema that have the name of one of ours stay in the text only."""
    row = {"text": options.filled(options.prefix, name) + text, "finish_reason": reason}
    return row | {column: value for column, value in columns.items() if column not in RESERVED}
