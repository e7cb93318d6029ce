"""Captions of many images on a Ray cluster: shards of work go to one Ray actor per GPU, or per some cores.

Each actor captions a shard as a single machine does, with a `BulkCaptioner`, and writes it to the output folder. Ray
restarts an actor that died, and gives it the shard again. The driver only lists files, hands out shards and counts.

Actors of Ray itself, not map_batches of Ray Data: Ray Data 2.60 tries the input of a dying worker forever, and how to
limit that is deprecated there. remote_inputs.py and shards.py say what its readers, writers and checkpoints lack.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from nanovlm.bulk.captioning import BulkCaptioner, EmptyCaptionError, failure_reason, merge_iterators
from nanovlm.bulk.inputs import read_names
from nanovlm.bulk.options import BulkOptions, BulkReport, OutputOptions
from nanovlm.bulk.remote_inputs import RemoteFile, RemoteInputs, find_remote, read_container
from nanovlm.bulk.resume_log import FAILURES, file_lock
from nanovlm.bulk.run import Progress, run_settings
from nanovlm.bulk.shards import Key, ShardFolder, ShardState
from nanovlm.captioner import Captioner
from nanovlm.errors import MissingExtraError, NanoVLMError, UsageError
from nanovlm.processing.image_loading import load_image, printable

if TYPE_CHECKING:
    from pyarrow import RecordBatch

logger = logging.getLogger(__name__)

SHARD_SIZE = 1000  # images; fewer where workers would be idle
SHARDS_PER_WORKER = 4
MAX_CPUS_PER_WORKER = 4
MAX_ATTEMPTS = 4  # at a shard whose worker dies each time
READ_AHEAD = 64  # images of a tar or parquet file
WORKER_DIED = f"the worker died {MAX_ATTEMPTS} times at this shard, perhaps of a lack of memory; try smaller shards"


@dataclass(frozen=True)
class RayOptions:
    """Which cluster captions, how its work is divided, and where captions go."""

    out: str | os.PathLike  # a folder, or the URI of one
    address: str | None = None  # as of ray.init; None: a running cluster, or else this machine
    shard_format: str = "parquet"  # or jsonl
    shard_size: int | None = None  # images; None: at most SHARD_SIZE
    cpus_per_worker: int | None = None  # None: 1 beside a GPU, else at most MAX_CPUS_PER_WORKER
    device: str = "auto"  # auto: GPUs if the cluster has any

    def __post_init__(self) -> None:
        for name in ("shard_size", "cpus_per_worker"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')} {value} is less than 1")


@dataclass(frozen=True)
class Shard:
    """The work of one task: the images of some files, or one tar or parquet file without the members in skip."""

    name: str
    files: list[RemoteFile]
    skip: frozenset[str | None] = frozenset()


@dataclass(frozen=True)
class ShardReport:
    """Counts, failures and times of a shard."""

    captioned: int = 0
    failures: Sequence[dict[str, Any]] = ()
    empty: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0


def caption_on_ray(
    load: Callable[[], Captioner],
    names: Sequence[str],
    ray_options: RayOptions,
    options: BulkOptions | None = None,
    output: OutputOptions | None = None,
    *,
    names_file: str | os.PathLike | None = None,
    recursive: bool = True,
    model_settings: Mapping[str, object] | None = None,
) -> BulkReport:
    """Caption the images that files, folders, patterns, tars and parquet files name, by path or URI, into shards.

    load makes the captioner of a worker, so it must be something that pickle knows on every machine. Of output, only
    prefix and suffix are used. If the run is interrupted, the same call resumes it: images that are in shards are
    done, those that failed are tried again and listed in failures.jsonl. No image is lost if a worker dies; a shard
    whose worker has died MAX_ATTEMPTS times fails. UsageError if there is no cluster, or the output folder holds
    captions of other settings; an error of the model or of the output folder ends the run.
    """
    options, output = options or BulkOptions(), output or OutputOptions()
    if options.prompt_template:
        raise UsageError("a prompt template reads files beside images; caption on one machine")
    folder = ShardFolder(os.fspath(ray_options.out), ray_options.shard_format)
    names = [*names, *(read_names(names_file) if names_file is not None else [])]
    inputs = find_remote(names, recursive, exclude=folder.uri)
    folder.create()
    with file_lock(Path(folder.path, ".captions.lock"), folder.uri) if folder.is_local else nullcontext():
        folder.check_settings(run_settings(options, output, model_settings or {}))
        state, started = folder.read_state(), time.perf_counter()
        todo = [file for file in inputs.files if needs_captions(file, state)]
        reports = _run(todo, state, load, ray_options, (options, output, folder)) if todo else []
        failures = [row for report in reports for row in report.failures] + other_failures(inputs, state, todo)
        has_failures = folder.write_failures(failures)
    busy = sum(report.seconds for report in reports)
    return BulkReport(
        captioned=sum(report.captioned for report in reports),
        already_done=sum(len(state.done.get(file.uri, ())) for file in inputs.files),
        remaining=0,
        failed=len(failures),
        empty=sum(report.empty for report in reports),
        left_out=dict(inputs.left_out),
        seconds=time.perf_counter() - started if todo else 0.0,
        utilization=sum(report.model_seconds for report in reports) / busy if busy else 0.0,
        failures=f"{folder.uri}/{FAILURES}" if has_failures else None,
        resume_log=None,
    )


def other_failures(inputs: RemoteInputs, state: ShardState, todo: Sequence[RemoteFile]) -> list[dict[str, Any]]:
    """Names that gave nothing, and failures of earlier runs that were not tried again."""
    for name, reason in inputs.missing:
        logger.warning("%s: %s", printable(name), reason)
    tried = {file.uri for file in todo}
    earlier = [failure_row(key, reason) for key, reason in state.failed.items() if key[0] not in tried]
    return [failure_row((name, None), reason) for name, reason in inputs.missing] + earlier


def needs_captions(file: RemoteFile, state: ShardState) -> bool:
    """Whether a file is not done: it has no captions, or it is a tar or parquet file in which something failed."""
    if not file.is_container:
        return file.uri not in state.done
    return file.uri not in state.done or any(file_name == file.uri for file_name, _ in state.failed)


def make_shards(files: Sequence[RemoteFile], state: ShardState, size: int | None, n_workers: int) -> list[Shard]:
    """A shard for each tar and parquet file, and shards of at most `size` images for the other files, in order."""
    images = [file for file in files if not file.is_container]
    size = size or max(1, min(SHARD_SIZE, -(-len(images) // (SHARDS_PER_WORKER * n_workers))))
    groups = [[file] for file in files if file.is_container]
    groups += [images[i : i + size] for i in range(0, len(images), size)]
    return [
        Shard(f"shard-{i:06}", group, frozenset(state.done.get(group[0].uri, ())))
        for i, group in enumerate(groups, start=state.n_shards)
    ]


def failure_row(key: Key, reason: str) -> dict[str, Any]:
    return {"file_name": key[0], **({} if key[1] is None else {"member": key[1]}), "reason": reason}


def caption_shard(
    captioner: Captioner, shard: Shard, options: BulkOptions, output: OutputOptions, folder: ShardFolder, cores: int
) -> ShardReport:
    """Caption the images of a shard and write them to the folder, in their order."""
    images = _ShardImages(shard)
    bulk = BulkCaptioner(captioner, options, cores=cores, read=images.open)
    results: dict[str, str | Exception] = {}
    with (
        closing(merge_iterators([images.names()], READ_AHEAD)) as names,
        closing(bulk.captions(names)) as captions,
    ):
        for name, result in captions:
            results[name] = result
            del images.contents[name]
    rows, columns, failures = [], [], []
    for name, key in images.keys.items():
        result = results[name]
        if isinstance(result, Exception):
            failures.append(failure_row(key, failure_reason(result, name)))
        else:
            rows.append({"file_name": key[0], "member": key[1], "text": output.decorate(result)})
            columns += [images.columns[name]] if name in images.columns else []
    folder.write_shard(shard.name, rows, failures, columns)
    empty = sum(isinstance(result, EmptyCaptionError) for result in results.values())
    return ShardReport(len(rows), failures, empty, bulk.seconds, sum(bulk.model_seconds) / bulk.n_workers)


class _ShardImages:
    """The images of a shard by name: read from their files by many threads, or in order from a tar or parquet."""

    def __init__(self, shard: Shard):
        self.shard = shard
        self.keys: dict[str, Key] = {}  # of each name, in order
        self.contents: dict[str, RemoteFile | bytes | Exception] = {}  # until an image has its result
        self.columns: dict[str, RecordBatch] = {}  # the rest of each row of a parquet file

    def names(self) -> Iterator[str]:
        for file in self.shard.files:
            if not file.is_container:
                yield self._add((file.uri, None), file)
                continue
            is_empty = not self.shard.skip
            for member in read_container(file, self.shard.skip):
                is_empty = False
                name = self._add((file.uri, member.name), member.content)
                if member.columns is not None and member.columns.num_columns:
                    self.columns[name] = member.columns
                yield name
            if is_empty:
                yield self._add((file.uri, None), NanoVLMError("no images in it"))

    def _add(self, key: Key, content: RemoteFile | bytes | Exception) -> str:
        name = "/".join(filter(None, key))
        self.keys[name], self.contents[name] = key, content
        return name

    def open(self, name: str) -> Image.Image:
        content = self.contents[name]
        if isinstance(content, Exception):
            raise content
        return load_image(content.read() if isinstance(content, RemoteFile) else content, name)


@dataclass(frozen=True)
class Workers:
    """Number of actors, and the resources of each."""

    count: int
    cpus: int
    gpus: int


def plan_workers(machines: Sequence[Mapping[str, float]], options: RayOptions) -> Workers:
    """One worker for each GPU of the machines, or without GPUs for every cpus_per_worker cores of a machine."""
    n_gpus = int(sum(resources.get("GPU", 0) for resources in machines))
    if options.device == "cuda" and not n_gpus:
        raise UsageError("device cuda, but the Ray cluster has no GPU")
    if n_gpus and options.device in ("auto", "cuda"):
        return Workers(n_gpus, options.cpus_per_worker or 1, 1)
    cores = [int(resources.get("CPU", 0)) for resources in machines if resources.get("CPU", 0) >= 1]
    cpus = options.cpus_per_worker or min([MAX_CPUS_PER_WORKER, *cores])
    count = sum(n // cpus for n in cores)
    if not count:
        raise UsageError(f"{cpus} CPUs per worker, but no machine of the Ray cluster has as many ({cores or 'none'})")
    return Workers(count, cpus, 0)


class _Worker:
    """An actor, which captions shards with one model."""

    def __init__(self, load: Callable[[], Captioner], settings: tuple[BulkOptions, OutputOptions, ShardFolder, int]):
        self.load, self.settings = load, settings
        self.captioner: Captioner | None = None

    def caption(self, shard: Shard) -> ShardReport:
        self.captioner = self.captioner or self.load()
        options, output, folder, cores = self.settings
        return caption_shard(self.captioner, shard, options, output, folder, cores)


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Connect this process to a Ray cluster; a connection that exists already is used and kept."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray reads it when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("captioning on a cluster needs Ray: pip install 'nanovlm[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    try:
        if match := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or ""):
            socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10).close()  # Ray waits 2 minutes
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise UsageError(f"Ray cluster {address or 'auto'}: {reason}; start one with ray start --head") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _run(
    files: Sequence[RemoteFile],
    state: ShardState,
    load: Callable[[], Captioner],
    options: RayOptions,
    settings: tuple[BulkOptions, OutputOptions, ShardFolder],
) -> list[ShardReport]:
    """Caption files in shards on the cluster; a report for each shard."""
    reports: list[ShardReport] = []
    with _cluster(options.address) as ray:
        workers = plan_workers([node["Resources"] for node in ray.nodes() if node["Alive"]], options)
        shards = make_shards(files, state, options.shard_size, workers.count)
        actor = ray.remote(_Worker).options(
            num_cpus=workers.cpus, num_gpus=workers.gpus, max_restarts=-1, max_task_retries=MAX_ATTEMPTS - 1
        )
        actors = [actor.remote(load, (*settings, workers.cpus)) for _ in range(min(workers.count, len(shards)))]
        running: dict[Any, tuple[Any, Shard | None]] = {a.__ray_ready__.remote(): (a, None) for a in actors}
        del actors  # an actor without a task ends
        todo = shards[::-1]
        with Progress(len(shards), unit="shard") as progress:
            try:
                while len(reports) < len(shards):  # a busy cluster may never start some of the actors
                    (done,), _ = ray.wait(list(running))
                    worker, shard = running.pop(done)
                    if shard is None:
                        ray.get(done)  # raises if a machine lacks nanovlm
                    else:
                        reports.append(_report(ray, done, shard))
                        progress.update(sum(len(report.failures) for report in reports))
                    if todo:
                        shard = todo.pop()
                        running[worker.caption.remote(shard)] = worker, shard
            except KeyboardInterrupt:
                done, total = len(reports), len(shards)
                logger.warning("stopped after %d of %d shards; run the same command to resume", done, total)
                raise
            except ray.exceptions.RayError as error:
                raise NanoVLMError(
                    f"the Ray cluster failed after {len(reports)} of {len(shards)} shards: "
                    f"{str(error).strip().partition(chr(10))[0]}; run the same command to resume"
                ) from error
    return reports


def _report(ray: Any, task: Any, shard: Shard) -> ShardReport:
    """The report of a finished task; raises the error of the worker's code. A worker that died fails its files."""
    try:
        report = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        error.cause.add_note(f"in a worker:\n{error}")
        raise error.cause from None
    except ray.exceptions.RayActorError:
        report = ShardReport(failures=[failure_row((file.uri, None), WORKER_DIED) for file in shard.files])
    for failure in report.failures:
        name = "/".join(filter(None, (failure["file_name"], failure.get("member"))))
        logger.warning("%s: %s", printable(name), failure["reason"])
    return report
