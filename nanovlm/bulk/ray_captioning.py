"""Captions of many images on a Ray cluster: map_batches of Ray Data gives shards of work to actors that hold a model.

Each actor captions a shard with a `BulkCaptioner` and writes files of captions whole, so no interruption loses one that
is written. If a worker dies, its shard is captioned again. Each run reads tars and parquet files from their start to
find what is new in them, and failures.jsonl lists the failures of the last run alone.
"""

import logging
import os
import re
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm.bulk.captioning import BulkCaptioner, EmptyCaptionError, failure_reason
from nanovlm.bulk.inputs import read_names
from nanovlm.bulk.options import FAILURES, BulkOptions, BulkReport, OutputOptions
from nanovlm.bulk.outputs import json_line
from nanovlm.bulk.remote_inputs import RemoteImage, find_remote, is_container, read_images
from nanovlm.bulk.run import Progress
from nanovlm.bulk.shards import Done, ShardFolder
from nanovlm.captioner import Captioner
from nanovlm.data.file_lock import file_lock
from nanovlm.errors import MissingExtraError, NanoVLMError, UsageError
from nanovlm.options import check_positive
from nanovlm.processing.image_loading import printable

if TYPE_CHECKING:
    from fsspec.core import OpenFile

logger = logging.getLogger(__name__)

SHARD_SIZE = 1000  # images; fewer where workers would be idle
MAX_CPUS_PER_WORKER = 4
MAX_ATTEMPTS = 4  # at a shard whose worker dies each time
ROUNDS = 2  # the attempts of one round may all be at a machine that is gone, before Ray knows it
WORKER_DIED = f"the worker died {MAX_ATTEMPTS} times at this shard, perhaps of a lack of memory; try smaller shards"

Files = Mapping[str, "OpenFile"]  # by URI
# Files of images, or one tar or parquet file; its members to skip; how many images to caption, None for all
Shard = tuple[Files, set[str | None], int | None]
Settings = tuple[Callable[[], Captioner], BulkOptions, OutputOptions, ShardFolder]


@dataclass(frozen=True)
class RayOptions:
    """Which cluster captions, how its work is divided, and where captions go."""

    out: str | os.PathLike[str]  # a folder, or the URI of one
    address: str | None = None  # as of ray.init; None: a running cluster, or else this machine
    shard_format: str = "parquet"  # or jsonl
    shard_size: int | None = None  # images; None: at most SHARD_SIZE
    cpus_per_worker: int | None = None  # None: 1 beside a GPU, else at most MAX_CPUS_PER_WORKER
    device: str = "auto"  # auto: GPUs if the cluster has any

    def __post_init__(self) -> None:
        check_positive({"shard size": self.shard_size, "cpus per worker": self.cpus_per_worker})
        if self.shard_format not in ("parquet", "jsonl"):
            raise UsageError(f"shard format {self.shard_format!r} is none of parquet, jsonl")


@dataclass
class ShardReport:
    """What a worker did with a shard; error ends the run."""

    number: int
    captioned: int = 0
    empty: int = 0
    repeated: int = 0
    failures: list[tuple[str, str | None, str]] = field(default_factory=list)  # file, member and reason
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
    """Caption the images that files, folders, patterns, tars and parquet files name, by path or URI, into shards.

    load makes the captioner of a worker, so it must be something that pickle knows on every machine. Of output, only
    prefix is used. If the run is interrupted, the same call resumes it: images that are in shards are done, all
    others are tried again. limit is the largest number of images to caption now, divided among tars and
    parquet files; the same call then goes on. A shard whose worker has died MAX_ATTEMPTS times fails. UsageError if
    there is no cluster; an error of the model or of the output ends the run.
    """
    options, output = options or BulkOptions(), output or OutputOptions()
    folder = ShardFolder(os.fspath(ray_options.out), ray_options.shard_format)
    settings = load, options, output, folder
    files, others = find_remote([*names, *read_names(names_file)], recursive, exclude=folder.uri)
    folder.create()
    with file_lock(Path(folder.path, ".captions.lock"), folder.uri) if folder.is_local else nullcontext():
        done, started = folder.done(), time.perf_counter()
        todo, remaining = _limited(_todo(files, done), limit)
        reports, failures = [ShardReport(-1, failures=[(name, None, reason) for name, reason in others.missing])], []
        try:
            for report in chain(reports.copy(), _run(files, todo, done, ray_options, settings) if todo else ()):
                reports.append(report)
                failures += [_failure_row(*failure) for failure in report.failures]
        finally:
            folder.write(FAILURES, b"".join(map(json_line, failures)))
    captioned = sum(report.captioned for report in reports)
    return BulkReport(
        captioned=captioned,
        already_done=sum(len(done.get(uri, ())) for uri in files),
        remaining=remaining,
        failed=len(failures),
        empty=sum(report.empty for report in reports),
        repeated=sum(report.repeated for report in reports),
        left_out=dict(others.left_out),
        seconds=time.perf_counter() - started if captioned else 0.0,
        failures=f"{folder.uri}/{FAILURES}" if failures else None,
    )


def _todo(files: Files, done: Done) -> list[str]:
    """Images without a caption, and all tars and parquet files: what is new in them is found by reading."""
    return [uri for uri in files if is_container(uri) or uri not in done]


def _limited(uris: Sequence[str], limit: int | None) -> tuple[dict[str, int | None], int]:
    """How many images to caption of each file, None for all; and how many images, or tars and so on, are left."""
    if limit is None:
        return dict.fromkeys(uris), 0
    containers = [uri for uri in uris if is_container(uri)]
    images = [uri for uri in uris if not is_container(uri)]
    todo: dict[str, int | None] = dict.fromkeys(images[:limit], 1)
    left = limit - len(todo)
    for i, uri in enumerate(containers):
        if share := left * (i + 1) // len(containers) - left * i // len(containers):
            todo[uri] = share
    return todo, len(uris) - len(todo)


def _failure_row(file_name: str, member: str | None, reason: str) -> dict[str, Any]:
    logger.warning("%s: %s", printable("/".join(filter(None, (file_name, member)))), reason)
    return {"file_name": file_name, **({} if member is None else {"member": member}), "reason": reason}


@dataclass
class Worker:
    """An actor, which captions shards with one model, at most `size` images at once."""

    shards: Sequence[Shard]
    settings: Settings
    size: int
    cores: int
    captioner: Captioner | None = None

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[ShardReport]]:
        number = int(batch["shard"][0])
        try:
            report = self.caption(number)
        except Exception as error:  # raised again where the run was started
            error.add_note(f"in a worker:\n{traceback.format_exc()}")
            report = ShardReport(number, error=error)
        return {"report": [report]}

    def caption(self, number: int) -> ShardReport:
        """Caption the images of a shard and write them to the folder, in their order."""
        (files, skip, limit), report = self.shards[number], ShardReport(number)
        images = islice((image for uri, file in files.items() for image in read_images(uri, file, skip)), limit)
        while first := next(images, None):
            self._caption_group(chain([first], islice(images, self.size - 1)), report)
        return report

    def _caption_group(self, images: Iterable[RemoteImage], report: ShardReport) -> None:
        group: dict[str, RemoteImage] = {}
        load, options, output, folder = self.settings
        self.captioner = self.captioner or load()
        bulk = BulkCaptioner(
            self.captioner,
            options,
            cores=self.cores,
            read=lambda name: group[name].open(),
        )
        for name, result in bulk.captions(group.setdefault(image.name, image).name for image in images):
            group[name].content, group[name].result = b"", result
        captioned = [image for image in group.values() if isinstance(image.result, str)]
        folder.write_shard(list(group), captioned, output.decorate)
        report.captioned += len(captioned)
        report.repeated += sum(bulk.repetitions)
        for name, image in group.items():
            if isinstance(image.result, Exception):
                report.failures.append((image.file_name, image.member, failure_reason(image.result, name)))
                report.empty += isinstance(image.result, EmptyCaptionError)


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


def _run(
    files: Files, todo: Mapping[str, int | None], done: Done, options: RayOptions, settings: Settings
) -> Iterator[ShardReport]:
    """Caption files in shards on the cluster; a report for each shard, as they finish."""
    ray = _connect(options.address)
    count, cpus, gpus = plan_workers([node["Resources"] for node in ray.nodes() if node["Alive"]], options)
    images = [uri for uri in todo if not is_container(uri)]
    size = options.shard_size or max(1, min(SHARD_SIZE, -(-len(images) // (4 * count))))
    containers = [uri for uri in todo if is_container(uri)]
    shards: list[Shard] = [({uri: files[uri]}, done.get(uri, set()), todo[uri]) for uri in containers]
    groups = [images[i : i + size] for i in range(0, len(images), size)]
    shards += [({uri: files[uri] for uri in group}, set(), None) for group in groups]
    warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")  # it has max_task_retries
    lost, failed = dict(enumerate(shards)), 0
    try:
        with Progress(len(shards), unit="shard") as progress:
            for _ in range(ROUNDS):
                if not lost:
                    break
                rows = ray.data.from_items([{"shard": i} for i in lost], override_num_blocks=len(lost))
                rows.context.enable_progress_bars = False
                rows.context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0  # all workers are busy
                rows.context.max_errored_blocks = -1  # a shard whose worker dies each time gives no report
                reports = rows.map_batches(
                    Worker,
                    batch_size=1,
                    fn_constructor_args=(shards, settings, options.shard_size or SHARD_SIZE, cpus),
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
        n_done = len(shards) - len(lost)
        logger.warning("stopped after %d of %d shards; run the same command to resume", n_done, len(shards))
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise NanoVLMError(f"the Ray cluster failed: {reason}; run the same command to resume") from error
    for number, (uris, _, _) in lost.items():
        yield ShardReport(number, failures=[(uri, None, WORKER_DIED) for uri in uris])
