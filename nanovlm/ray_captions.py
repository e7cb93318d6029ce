"""Captions of images on a Ray cluster: Ray Data reads, schedules and writes; a worker captions batches."""

import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from models.common import files
from nanovlm.bulk import Report, caption_rows, extensions
from nanovlm.console import has_terminal
from nanovlm.errors import NanoVLMError, UsageError, first_line, needs_extra
from nanovlm.options import CaptionOptions, ModelOptions

BATCH_SIZE = 16  # images that a worker gets at once, and captions again if it dies
BLOCK = 256  # images of a parquet file, at most
CPUS_PER_WORKER = 4  # without GPUs, and at most
MAX_RETRIES = 8  # of a batch whose worker dies
TEXT_COLUMNS = ("file_name", "text", "finish_reason", "error")


class Worker:
    """A model on one actor, which turns batches of images into rows with captions."""

    def __init__(self, model: ModelOptions, options: CaptionOptions):
        from nanovlm.captioner import Captioner

        self.captioner = Captioner.load(model)
        self.options = options

    def __call__(self, batch: dict[str, Any]) -> Any:
        import pyarrow

        images = zip(batch["path"], batch["bytes"])
        answers = caption_rows(self.captioner, images, self.options, BATCH_SIZE)
        rows = [{"error": str(row)} if isinstance(row, Exception) else row for row in answers]
        columns = {"file_name": batch["path"]}
        columns |= {name: [row.get(name) for row in rows] for name in chain(TEXT_COLUMNS[1:], *rows)}
        kinds = dict.fromkeys(TEXT_COLUMNS, pyarrow.string())  # even of a batch in which all are empty
        return pyarrow.table({name: pyarrow.array(column, kinds.get(name)) for name, column in columns.items()})


def caption_on_ray(
    names: Sequence[str],
    out: str,
    model: ModelOptions,
    options: CaptionOptions | None = None,
    *,
    address: str | None = None,
    workers: int | None = None,
) -> Report:
    """Caption images and those of folders, by path or URI, into parquet files in the folder or URI out.

    Images that have a text there are skipped, so the same call goes on after a failure. A worker that dies is
    replaced, and its images are captioned again. workers is how many at most; by default one for each GPU, or for
    every CPUS_PER_WORKER cores. address is that of `ray.init`: by default a cluster that runs, or else this machine.
    """
    options = options or CaptionOptions()
    report = Report()
    started = time.monotonic()
    report.images = list_images(names, options, report)
    before = captioned(out)
    report.skipped = [image for image in report.images if image in before]
    if todo := [image for image in report.images if image not in before]:
        ray = connect(address)
        is_local = "://" not in out
        if is_local:
            Path(out).mkdir(parents=True, exist_ok=True)
        with files.locked(out) if is_local else nullcontext():
            _run(ray, todo, out, model, options, workers)
    after = captioned(out)
    errors = captioned(out, "error")
    for image in todo:
        if image not in after:
            report.fail(image, errors.get(image, "its worker died each time, perhaps of a lack of memory"))
    report.captioned = len(after) - len(before)
    report.seconds = time.monotonic() - started
    return report


def _run(
    ray: Any, images: Sequence[str], out: str, model: ModelOptions, options: CaptionOptions, workers: int | None
) -> None:
    resources = ray.cluster_resources()
    n_gpus = int(resources.get("GPU", 0)) if model.device in ("auto", "cuda") else 0
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    num_cpus = 1 if n_gpus else max(1, min(CPUS_PER_WORKER, *cores))
    n = workers or n_gpus or max(1, sum(n // num_cpus for n in cores))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = has_terminal()
    context.max_errored_blocks = -1  # images whose worker dies each time are left to the next run
    beside = {"num_cpus": 0}  # files are read and written even where workers take all cores
    n_blocks = max(n, -(-len(images) // BLOCK))
    try:
        ray.data.read_binary_files(
            list(images), include_paths=True, override_num_blocks=n_blocks, ray_remote_args=beside
        ).map_batches(
            Worker,
            fn_constructor_args=(model, options),
            batch_size=BATCH_SIZE,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=n),
            num_cpus=num_cpus,
            num_gpus=1 if n_gpus else 0,
            max_task_retries=MAX_RETRIES,
        ).write_parquet(out, mode="append", ray_remote_args=beside)
    except ray.exceptions.RayError as error:
        raise NanoVLMError(f"the Ray cluster failed: {first_line(error)}; run the same command to resume") from error


def list_images(names: Sequence[str], options: CaptionOptions, report: Report) -> list[str]:
    """The images of files and folders, by path or URI; hidden ones are left out. A name that gives none fails."""
    from pyarrow import fs

    images: dict[str, None] = {}
    for name in names:
        try:
            system, path = _file_system(name)
            scheme = name[: name.find("://") + 3] if "://" in name else ""
            (info,) = system.get_file_info([path])
            if info.type == fs.FileType.NotFound:
                raise FileNotFoundError("No such file or directory")
            is_file = info.type == fs.FileType.File
            found = [info] if is_file else system.get_file_info(fs.FileSelector(path, recursive=True))
        except (OSError, ValueError) as error:
            report.fail(name, first_line(error))
            continue
        for info in sorted(found, key=lambda info: info.path):
            parts = PurePosixPath(info.path[len(path) :]).parts
            is_hidden = any(part[0] == "." or part in files.NO_IMAGE_FOLDERS for part in parts)
            if is_file or (not is_hidden and PurePosixPath(info.path).suffix.lower() in extensions(options)):
                images[scheme + info.path] = None
    return list(images)


def captioned(out: str, column: str = "text") -> dict[str, str]:
    """The text, or another column, of each image that has one in the parquet files of a folder or URI."""
    import pyarrow
    from pyarrow import dataset, fs

    system, path = _file_system(out)
    found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    paths = [info.path for info in found if info.extension == "parquet"]
    schema = pyarrow.schema([("file_name", pyarrow.string()), (column, pyarrow.string())])
    try:
        rows = dataset.dataset(paths, filesystem=system, format="parquet", schema=schema).to_table().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{out} has parquet files that hold no captions: {first_line(error)}; name another") from None
    return {row["file_name"]: row[column] for row in rows if row[column]}


def _file_system(name: str) -> tuple[Any, str]:
    from pyarrow import fs

    return fs.FileSystem.from_uri(name) if "://" in name else (fs.LocalFileSystem(), os.path.abspath(name))


def connect(address: str | None) -> Any:
    """Connect this process to a Ray cluster, unless it is connected; returns the library."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs_extra("ray", "captions on a cluster"):
        import ray.data
    try:
        if match := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or ""):
            socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10).close()  # Ray waits 2 minutes
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, ignore_reinit_error=True)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise UsageError(f"Ray cluster {address or 'auto'}: {reason}; start one with ray start --head") from None
    return ray
