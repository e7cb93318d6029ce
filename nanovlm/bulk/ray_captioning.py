"""Captions of many images on a Ray cluster: map_batches of Ray Data gives parts of the work to actors with a model.

Each actor captions a part with a `BulkCaptioner` and writes its captions as one parquet file, whole, so no interruption
loses one that is written. If a worker dies, its part is captioned again. failures.jsonl lists the failures of the last
run alone.
"""

import hashlib
import logging
import os
import re
import socket
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm.bulk.captioning import BulkCaptioner, EmptyCaptionError, failure_reason
from nanovlm.bulk.inputs import read_names
from nanovlm.bulk.options import FAILURES, BulkOptions, BulkReport, OutputOptions
from nanovlm.bulk.outputs import json_line
from nanovlm.bulk.remote_inputs import find_remote, open_filesystem, read_image
from nanovlm.bulk.run import Progress
from nanovlm.captioner import Captioner
from nanovlm.data.file_lock import file_lock
from nanovlm.errors import MissingExtraError, NanoVLMError, OutputError, UsageError
from nanovlm.options import check_positive
from nanovlm.processing.image_loading import printable

if TYPE_CHECKING:
    from fsspec.core import OpenFile

logger = logging.getLogger(__name__)

PART_SIZE = 1000  # images; fewer where workers would be idle
MAX_CPUS_PER_WORKER = 4
MAX_ATTEMPTS = 4  # at a part whose worker dies each time
ROUNDS = 2  # the attempts of one round may all be at a machine that is gone, before Ray knows it
WORKER_DIED = f"the worker died {MAX_ATTEMPTS} times at it or at images beside it, perhaps of a lack of memory"

Files = Mapping[str, "OpenFile"]  # by URI


@dataclass(frozen=True)
class RayOptions:
    """Which cluster captions, how its work is divided, and where captions go."""

    out: str | os.PathLike[str]  # a folder, or the URI of one
    address: str | None = None  # as of ray.init; None: a running cluster, or else this machine
    cpus_per_worker: int | None = None  # None: 1 beside a GPU, else at most MAX_CPUS_PER_WORKER
    device: str = "auto"  # auto: GPUs if the cluster has any

    def __post_init__(self) -> None:
        check_positive({"cpus per worker": self.cpus_per_worker})


class CaptionFolder:
    """The output folder: parquet files of rows with file_name and text, each written whole."""

    def __init__(self, uri: str):
        self.filesystem, path, prefix = open_filesystem(uri)
        self.path = path.rstrip("/")
        self.uri, self.is_local = prefix + self.path, not prefix

    def create(self) -> None:
        """Make the folder. UsageError if that is not possible."""
        try:
            self.filesystem.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.uri}: the folder cannot be made: {error.strerror or error}") from None

    def done(self) -> set[str]:
        """The files that have a caption. UsageError if a file of captions cannot be read."""
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        done: set[str] = set()
        for path in self.filesystem.ls(self.path, detail=False):
            if not path.endswith(".parquet"):
                continue
            try:
                with self.filesystem.open(path) as file:
                    done.update(read_table(file, columns=["file_name"])["file_name"].to_pylist())
            except (ArrowException, KeyError, OSError) as error:
                raise UsageError(f"{path} is not a file of captions: {error}; move it away") from None
        return done

    def write_captions(self, group: Sequence[str], texts: Mapping[str, str]) -> None:
        """Write the texts of a group of files, which names the parquet file: doing it again replaces it."""
        import pyarrow
        from pyarrow.parquet import write_table

        columns = {"file_name": list(texts), "text": list(texts.values())}
        write_table(pyarrow.table(columns), sink := pyarrow.BufferOutputStream())
        number = hashlib.sha256("\n".join(group).encode(errors="surrogateescape")).hexdigest()[:16]
        self.write(f"part-{number}.parquet", sink.getvalue().to_pybytes() if texts else b"")

    def write(self, name: str, data: bytes) -> None:
        """Write a file so that it is never seen in parts, or delete it if it would be empty. OutputError if not."""
        path, new = f"{self.path}/{name}", f"{self.path}/.{name}.{uuid.uuid4().hex}"
        try:
            if data:
                self.filesystem.pipe_file(new, data)
                self.filesystem.mv(new, path)
            elif self.filesystem.exists(path):
                self.filesystem.rm_file(path)
        except OSError as error:
            raise OutputError(f"{self.uri}/{name}: {error}; run the same command to resume") from error


Settings = tuple[Callable[[], Captioner], BulkOptions, OutputOptions, CaptionFolder]


@dataclass
class PartReport:
    """What a worker did with a part; error ends the run."""

    number: int
    captioned: int = 0
    empty: int = 0
    repeated: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)  # file and reason
    error: Exception | None = None


def caption_on_ray(
    load: Callable[[], Captioner],
    names: Sequence[str | os.PathLike[str]],
    ray_options: RayOptions,
    options: BulkOptions | None = None,
    output: OutputOptions | None = None,
    *,
    names_file: str | os.PathLike[str] | None = None,
    recursive: bool = True,
    limit: int | None = None,
) -> BulkReport:
    """Caption the images that files, folders and patterns name, by path or URI, into a folder of parquet files.

    load makes the captioner of a worker, so it must be something that pickle knows on every machine. Of output, only
    prefix is used. If the run is interrupted, the same call resumes it: images that are in the parquet files are done,
    all others are tried again. limit is the largest number of images to caption now; the same call then goes on. A
    part whose worker has died MAX_ATTEMPTS times fails. UsageError if there is no cluster; an error of the model or of
    the output ends the run.
    """
    options, output = options or BulkOptions(), output or OutputOptions()
    folder = CaptionFolder(os.fspath(ray_options.out))
    settings = load, options, output, folder
    files, others = find_remote([*names, *read_names(names_file)], recursive)
    folder.create()
    with file_lock(Path(folder.path, ".captions.lock"), folder.uri) if folder.is_local else nullcontext():
        done, started = folder.done(), time.perf_counter()
        missing = [uri for uri in files if uri not in done]
        todo = missing[:limit]
        reports: list[PartReport] = []
        failures = [_failure_row(*failure) for failure in others.missing]
        try:
            for report in _run({uri: files[uri] for uri in todo}, ray_options, settings) if todo else ():
                reports.append(report)
                failures += [_failure_row(*failure) for failure in report.failures]
        finally:
            folder.write(FAILURES, b"".join(map(json_line, failures)))
    captioned = sum(report.captioned for report in reports)
    return BulkReport(
        captioned=captioned,
        already_done=len(files) - len(missing),
        remaining=len(missing) - len(todo),
        failed=len(failures),
        empty=sum(report.empty for report in reports),
        repeated=sum(report.repeated for report in reports),
        left_out=dict(others.left_out),
        seconds=time.perf_counter() - started if captioned else 0.0,
        failures=f"{folder.uri}/{FAILURES}" if failures else None,
    )


def _failure_row(file_name: str, reason: str) -> dict[str, str]:
    logger.warning("%s: %s", printable(file_name), reason)
    return {"file_name": file_name, "reason": reason}


@dataclass
class Worker:
    """An actor, which captions parts with one model."""

    parts: Sequence[Files]
    settings: Settings
    cores: int
    captioner: Captioner | None = None

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[PartReport]]:
        number = int(batch["part"][0])
        try:
            report = self.caption(number)
        except Exception as error:  # raised again where the run was started
            error.add_note(f"in a worker:\n{traceback.format_exc()}")
            report = PartReport(number, error=error)
        return {"report": [report]}

    def caption(self, number: int) -> PartReport:
        """Caption the images of a part and write them to the folder, in their order."""
        load, options, output, folder = self.settings
        files, report = self.parts[number], PartReport(number)
        self.captioner = self.captioner or load()
        bulk = BulkCaptioner(self.captioner, options, cores=self.cores, read=lambda uri: read_image(uri, files[uri]))
        texts: dict[str, str] = {}
        for uri, result in bulk.captions(files):
            if isinstance(result, str):
                texts[uri] = output.decorate(result)
            else:
                report.failures.append((uri, failure_reason(result, uri)))
                report.empty += isinstance(result, EmptyCaptionError)
        folder.write_captions(list(files), {uri: texts[uri] for uri in files if uri in texts})
        report.captioned, report.repeated = len(texts), sum(bulk.repetitions)
        return report


def plan_workers(machines: Sequence[Mapping[str, float]], options: RayOptions) -> tuple[int, int, int]:
    """The number of workers, and CPUs and GPUs of each: one per GPU, or without GPUs per cpus_per_worker cores."""
    n_gpus = int(sum(resources.get("GPU", 0) for resources in machines))
    if options.device == "cuda" and not n_gpus:
        raise UsageError("device cuda, but the Ray cluster has no GPU; take cpu")
    if n_gpus and options.device in ("auto", "cuda"):
        return n_gpus, options.cpus_per_worker or 1, 1
    cores = [int(resources.get("CPU", 0)) for resources in machines if resources.get("CPU", 0) >= 1]
    cpus = options.cpus_per_worker or min([MAX_CPUS_PER_WORKER, *cores])
    count = sum(n // cpus for n in cores)
    if not count:
        raise UsageError(
            f"{cpus} CPUs per worker, but no machine of the Ray cluster has as many ({cores or 'none'}); ask for fewer"
        )
    return count, cpus, 0


def _connect(address: str | None) -> Any:
    """Connect this process to a Ray cluster, unless it is connected; returns the library."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray reads it when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray.data
    except ImportError:
        raise MissingExtraError("captioning on a cluster needs Ray: pip install 'nanovlm[ray]'") from None
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    if ray.is_initialized():
        return ray
    try:
        if match := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or ""):
            socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10).close()  # Ray waits 2 minutes
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise UsageError(f"Ray cluster {address or 'auto'}: {reason}; start one with ray start --head") from None
    return ray


def _run(files: Files, options: RayOptions, settings: Settings) -> Iterator[PartReport]:
    """Caption files in parts on the cluster; a report for each part, as they finish."""
    ray = _connect(options.address)
    count, cpus, gpus = plan_workers([node["Resources"] for node in ray.nodes() if node["Alive"]], options)
    size = max(1, min(PART_SIZE, -(-len(files) // (4 * count))))
    uris = list(files)
    parts = [{uri: files[uri] for uri in uris[i : i + size]} for i in range(0, len(uris), size)]
    warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")  # it has max_task_retries
    lost, failed = dict(enumerate(parts)), 0
    try:
        with Progress(len(parts), unit="part") as progress:
            for _ in range(ROUNDS):
                if not lost:
                    break
                rows = ray.data.from_items([{"part": i} for i in lost], override_num_blocks=len(lost))
                rows.context.enable_progress_bars = False
                rows.context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0  # all workers are busy
                rows.context.max_errored_blocks = -1  # a part whose worker dies each time gives no report
                reports = rows.map_batches(
                    Worker,
                    batch_size=1,
                    fn_constructor_args=(parts, settings, cpus),
                    compute=ray.data.ActorPoolStrategy(min_size=1, max_size=count, max_tasks_in_flight_per_actor=1),
                    num_cpus=cpus,
                    num_gpus=gpus,
                    max_task_retries=MAX_ATTEMPTS // ROUNDS - 1,
                )
                for row in reports.iter_rows():
                    report = row["report"]
                    if report.error:
                        raise report.error
                    del lost[report.number]
                    yield report
                    progress.update(failed := failed + len(report.failures))
    except KeyboardInterrupt:
        n_done = len(parts) - len(lost)
        logger.warning("stopped after %d of %d parts; run the same command to resume", n_done, len(parts))
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise NanoVLMError(f"the Ray cluster failed: {reason}; run the same command to resume") from error
    for number, part in lost.items():
        yield PartReport(number, failures=[(uri, WORKER_DIED) for uri in part])
