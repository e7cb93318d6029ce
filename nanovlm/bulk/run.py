"""Captions of many images into files: finds the images, skips those that are done, writes the others' captions."""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from nanovlm.bulk.captioning import BulkCaptioner, EmptyCaptionError, failure_reason
from nanovlm.bulk.inputs import ImageList, find_images, read_names
from nanovlm.bulk.options import BulkOptions, BulkReport, OutputOptions
from nanovlm.bulk.outputs import FailureLog, Output, Sidecars, open_output
from nanovlm.captioner import Captioner
from nanovlm.console import progress_bar
from nanovlm.data.file_lock import file_lock
from nanovlm.errors import NanoVLMError, OutputError, UsageError
from nanovlm.options import check_positive
from nanovlm.processing.image_loading import printable

logger = logging.getLogger(__name__)

LOG_INTERVAL = 30.0  # seconds between progress lines where there is no terminal
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_OF_ONE_IMAGE = (*DISK_FULL, errno.EROFS, errno.EIO)  # errors after which no other caption could be written


def caption_images(
    captioner: Captioner | Callable[[], Captioner],
    names: Sequence[str | os.PathLike[str]],
    options: BulkOptions | None = None,
    output: OutputOptions | None = None,
    *,
    names_file: str | os.PathLike[str] | None = None,
    recursive: bool = True,
    limit: int | None = None,
) -> BulkReport:
    """Caption every image that files, folders and patterns name, into files.

    captioner may be a function that loads one: it is called only if an image has no caption yet. names_file lists more
    names, see `read_names`. recursive includes subfolders. limit is the largest number of captions to write now; the
    same call then captions the next images. If the run is interrupted, even by `kill -9`, the same call resumes it:
    captions that exist are done, unless output.existing is overwrite. Images that fail are counted, and listed in
    failures.jsonl or, beside a table, TABLE.failures.jsonl. UsageError if the output cannot be written or another run
    writes to it. OutputError if it could not be written on.
    """
    check_positive({"limit": limit})
    options, output = options or BulkOptions(), output or OutputOptions()
    images = _find(names, names_file, recursive, options)
    folders = _folders(names)
    with ExitStack() as stack:
        for target, lock in _lock_files(output, folders).items():
            stack.enter_context(file_lock(lock, target))
        try:
            opened = open_output(output, Path(folders[0]))
        except OSError as error:  # a killed run's table is put in order first
            raise _output_error(error, output.table or Path(folders[0]), "no caption is written", output) from error
        return _caption_found(captioner, images, limit, options, opened)


def _find(
    names: Sequence[str | os.PathLike[str]],
    names_file: str | os.PathLike[str] | None,
    recursive: bool,
    options: BulkOptions,
) -> ImageList:
    images = find_images([*names, *read_names(names_file)], recursive, options.extensions)
    missing = images.missing + [(path, "no such file or folder; correct the path") for path in images.paths[:1]]
    if missing and not any(map(os.path.lexists, images.paths)) and not images.left_out:  # nothing to do, or to write
        name, reason = missing[0]
        raise UsageError(f"{printable(name)}: {reason}")
    return images


def _folders(names: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The folders that the run's own files belong to; the first one holds its failures."""
    return [os.fspath(name) for name in names if os.path.isdir(name)] or ["."]


def _lock_files(output: OutputOptions, folders: Sequence[str]) -> dict[str, Path]:
    """Each file or folder that the run writes to, and the lock file that keeps other runs away."""
    if output.is_stream:
        return {}
    if output.table is None:
        distinct = {os.path.realpath(name): name for name in folders}
        return {name: Path(name, ".captions.lock") for name in distinct.values()}
    try:
        output.table.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{output.table}: its folder cannot be made: {error.strerror}") from None
    return {str(output.table): output.table.with_name(f".{output.table.name}.lock")}


def _caption_found(
    captioner: Captioner | Callable[[], Captioner],
    images: ImageList,
    limit: int | None,
    options: BulkOptions,
    output: Output,
) -> BulkReport:
    failures = FailureLog(None if output.options.is_stream else output.failures)
    rejected = {path: reason for path in images.paths if (reason := output.reject_reason(path))}
    for name, reason in (*images.missing, *rejected.items()):
        failures.add(name, reason)
    accepted = [path for path in images.paths if path not in rejected]
    todo = [path for path in accepted if not output.is_done(path)]
    captioned, tried, bulk = 0, 0, None
    limit = len(todo) if limit is None else limit
    if todo:
        bulk = BulkCaptioner(captioner if isinstance(captioner, Captioner) else captioner(), options)
    while bulk and captioned < limit and tried < len(todo):  # images that fail do not count
        paths = todo[tried : tried + limit - captioned]
        captioned += _write_captions(bulk, paths, output, failures)
        tried += len(paths)
    try:
        output.finish(images.paths)
    except OSError as error:
        so_far = f"{captioned} of {len(todo)} captions are written"
        raise _output_error(error, output.target(""), so_far, output.options) from error
    return BulkReport(
        captioned=captioned,
        already_done=len(accepted) - len(todo),
        remaining=len(todo) - tried,
        failed=failures.count,
        empty=failures.empty,
        repeated=sum(bulk.repetitions) if bulk else 0,
        left_out=dict(images.left_out),
        seconds=bulk.seconds if bulk else 0.0,
        utilization=bulk.utilization if bulk else 0.0,
        failures=failures.path if failures.is_written else None,
    )


def _write_captions(bulk: BulkCaptioner, paths: Sequence[str], output: Output, failures: FailureLog) -> int:
    """Write the caption of each image as soon as it is finished; returns how many were written."""
    captioned, already_failed = 0, failures.count
    with Progress(len(paths)) as progress, closing(bulk.captions(paths)) as results:
        try:
            for path, result in results:
                error = result if isinstance(result, Exception) else _write(output, path, result)
                if error is None:
                    captioned += 1
                else:
                    failures.add(path, failure_reason(error, path), is_empty=isinstance(error, EmptyCaptionError))
                progress.update(failures.count - already_failed)
        except KeyboardInterrupt:
            logger.warning("stopped after %d of %d images; %s", captioned, len(paths), output.options.way_on)
            raise
        except BrokenPipeError:  # the reader of a stream has left, as `head` does
            raise
        except OSError as error:
            so_far = f"{captioned} of {len(paths)} captions are written"
            raise _output_error(error, output.target(path), so_far, output.options) from error
    return captioned


def _write(output: Output, path: str, caption: str) -> Exception | None:
    """Write a caption; returns the error if it concerns this image alone."""
    try:
        output.write(path, output.options.decorate(caption))
    except (NanoVLMError, OSError) as error:
        if isinstance(error, OSError) and (not isinstance(output, Sidecars) or error.errno in NOT_OF_ONE_IMAGE):
            raise
        return error
    return None


def _output_error(error: OSError, target: Path, so_far: str, options: OutputOptions) -> OutputError:
    """The error of a run that cannot go on, which names its file, what is done and how to resume."""
    way_out = "free some space" if error.errno in DISK_FULL else "make it writable"
    return OutputError(f"{target}: {error.strerror or error}; {so_far}; {way_out} and {options.way_on}")


class Progress:
    """A progress bar on a terminal, and a log line now and then anywhere else."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic, unit: str = "image"):
        self.bar, self.unit = progress_bar(total, unit), unit
        self.total, self.clock, self.done = total, clock, 0
        self.started = self.logged = clock()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def update(self, failed: int) -> None:
        """Count one more image; failed is how many of all have failed."""
        self.done += 1
        self.bar.update()
        if failed:
            self.bar.set_postfix_str(f"{failed:,} failed")
        now = self.clock()
        if self.bar.disable and now - self.logged >= LOG_INTERVAL:
            self.logged = now
            rate = self.done / (now - self.started)
            minutes = (self.total - self.done) / rate / 60
            done = f"{self.done}/{self.total} {self.unit}s"
            logger.info("%s, %.0f per minute, %.0f minutes left", done, 60 * rate, minutes)
