"""Captions of many images on a Ray cluster: Ray Data gives shards of work to one actor per GPU, or per some cores.

Each actor captions a shard as a single machine does, with a `BulkCaptioner`, and writes it to the output folder. Ray
gives the shard of an actor that died to another one. The driver only lists files, hands out shards and counts.
"""

import logging
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from nanovlm.bulk.captioning import BulkCaptioner, EmptyCaptionError, failure_reason, merge_iterators
from nanovlm.bulk.inputs import read_names
from nanovlm.bulk.options import BulkOptions, BulkReport, OutputOptions
from nanovlm.bulk.remote_inputs import RemoteFile, RemoteInputs, find_remote, read_container
from nanovlm.bulk.resume_log import FAILURES, file_lock
from nanovlm.bulk.run import Progress, run_settings
from nanovlm.bulk.shards import Key, Row, ShardFolder, ShardState
from nanovlm.captioner import Captioner
from nanovlm.errors import MissingExtraError, NanoVLMError, UsageError
from nanovlm.processing.image_loading import load_image, printable

logger = logging.getLogger(__name__)

SHARD_SIZE = 1000  # images; fewer where workers would be idle
SHARDS_PER_WORKER = 4
MAX_CPUS_PER_WORKER = 4
MAX_ATTEMPTS = 4  # at a shard whose worker dies each time
READ_AHEAD = 64  # images of a tar or parquet file


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
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ShardReport:
    """What became of a shard."""

    name: str
    captioned: int
    failures: list[dict[str, Any]]
    empty: int
    seconds: float
    model_seconds: float


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
        folder.forget_attempts()
        state = folder.read_state()
        todo = [file for file in inputs.files if needs_captions(file, state)]
        reports: list[ShardReport] = []
        started = time.perf_counter()
        if todo:
            with _cluster(ray_options.address) as ray:
                workers = plan_workers(ray, ray_options)
                shards = make_shards(todo, state, ray_options.shard_size, workers.count)
                make_worker = _WorkerSettings(load, options, output, folder, workers.cpus)
                reports = _run(ray, shards, workers, make_worker)
        failures = collect_failures(inputs, state, todo, reports)
        has_failures = folder.write_failures(failures)
        folder.forget_attempts()
    seconds = time.perf_counter() - started if todo else 0.0
    busy = sum(report.seconds for report in reports)
    return BulkReport(
        captioned=sum(report.captioned for report in reports),
        already_done=sum(len(state.done.get(file.uri, ())) for file in inputs.files),
        remaining=0,
        failed=len(failures),
        empty=sum(report.empty for report in reports),
        left_out=dict(inputs.left_out),
        seconds=seconds,
        utilization=sum(report.model_seconds for report in reports) / busy if busy else 0.0,
        failures=f"{folder.uri}/{FAILURES}" if has_failures else None,
        resume_log=None,
    )


def needs_captions(file: RemoteFile, state: ShardState) -> bool:
    """Whether a file is not done: it has no captions, or it is a tar or parquet file in which something failed."""
    if not file.is_container:
        return None not in state.done.get(file.uri, ())
    return file.uri not in state.done or any(file_name == file.uri for file_name, _ in state.failed)


def make_shards(files: Sequence[RemoteFile], state: ShardState, size: int | None, n_workers: int) -> list[Shard]:
    """A shard for each tar and parquet file, and shards of at most `size` images for the other files, in order."""
    images = [file for file in files if not file.is_container]
    if size is None:
        size = max(1, min(SHARD_SIZE, -(-len(images) // (SHARDS_PER_WORKER * n_workers))))
    groups: list[tuple[list[RemoteFile], frozenset[str]]] = [
        ([file], frozenset(member for member in state.done.get(file.uri, ()) if member is not None))
        for file in files
        if file.is_container
    ]
    groups += [(images[i : i + size], frozenset()) for i in range(0, len(images), size)]
    return [Shard(f"shard-{i:06}", group, skip) for i, (group, skip) in enumerate(groups, start=state.n_shards)]


def collect_failures(
    inputs: RemoteInputs, state: ShardState, todo: Sequence[RemoteFile], reports: Sequence[ShardReport]
) -> list[Row]:
    """All failures: of names, of this run's shards, and earlier ones that were not tried again."""
    for name, reason in inputs.missing:
        logger.warning("%s: %s", printable(name), reason)
    tried = {file.uri for file in todo}
    rows = [failure_row(name, None, reason) for name, reason in inputs.missing]
    rows += [failure_row(*key, reason) for key, reason in state.failed.items() if key[0] not in tried]
    return rows + [row for report in reports for row in report.failures]


def failure_row(file_name: str, member: str | None, reason: str) -> dict[str, Any]:
    return {"file_name": file_name, **({} if member is None else {"member": member}), "reason": reason}


def caption_shard(
    captioner: Captioner, shard: Shard, options: BulkOptions, output: OutputOptions, folder: ShardFolder, cores: int
) -> ShardReport:
    """Caption what a shard names, in the order in which it names it, and write it to the folder.

    A shard that was begun MAX_ATTEMPTS times and never finished fails instead.
    """
    if folder.count_attempt(shard.name) > MAX_ATTEMPTS:
        reason = f"the worker died {MAX_ATTEMPTS} times at this shard, perhaps of a lack of memory; try smaller shards"
        report = ShardReport(shard.name, 0, [failure_row(file.uri, None, reason) for file in shard.files], 0, 0.0, 0.0)
        folder.write_shard(shard.name, [], report.failures)
        return report
    images = _ShardImages(shard)
    bulk = BulkCaptioner(captioner, options, cores=cores, read=images.open)
    captions: dict[str, str] = {}
    errors: dict[str, Exception] = {}
    with (
        closing(merge_iterators([images.names()], READ_AHEAD)) as names,
        closing(bulk.captions(names)) as results,
    ):
        for name, result in results:
            images.release(name)
            if isinstance(result, Exception):
                errors[name] = result
            else:
                captions[name] = output.decorate(result)
    keys = images.keys
    rows = [{"file_name": keys[n][0], "member": keys[n][1], "text": captions[n]} for n in keys if n in captions]
    failures = [failure_row(*keys[n], failure_reason(errors[n], n)) for n in keys if n in errors]
    folder.write_shard(shard.name, rows, failures)
    empty = sum(isinstance(error, EmptyCaptionError) for error in errors.values())
    model_seconds = sum(bulk.model_seconds) / bulk.n_workers
    return ShardReport(shard.name, len(rows), failures, empty, bulk.seconds, model_seconds)


class _ShardImages:
    """The images of a shard by name: read from their files by many threads, or in order from a tar or parquet."""

    def __init__(self, shard: Shard):
        self.shard = shard
        self.keys: dict[str, Key] = {}  # of each name, in order
        self.contents: dict[str, RemoteFile | bytes | Exception] = {}

    def names(self) -> Iterator[str]:
        for key, content in self._contents():
            name = key[0] if key[1] is None else f"{key[0]}/{key[1]}"
            self.keys[name], self.contents[name] = key, content
            yield name

    def open(self, name: str) -> Image.Image:
        content = self.contents[name]
        if isinstance(content, Exception):
            raise content
        return load_image(content.read() if isinstance(content, RemoteFile) else content, name)

    def release(self, name: str) -> None:
        """Free what has been read of an image that has its result."""
        del self.contents[name]

    def _contents(self) -> Iterator[tuple[Key, RemoteFile | bytes | Exception]]:
        for file in self.shard.files:
            if not file.is_container:
                yield (file.uri, None), file
                continue
            is_empty = not self.shard.skip
            for member, content in read_container(file, self.shard.skip):
                is_empty = False
                yield (file.uri, member), content
            if is_empty:
                yield (file.uri, None), NanoVLMError("no images in it")


@dataclass(frozen=True)
class Workers:
    """How many actors run, and the resources of each."""

    count: int
    cpus: int
    gpus: int


def plan_workers(ray: Any, options: RayOptions) -> Workers:
    """One worker for each GPU of the cluster, or without GPUs for every cpus_per_worker cores of a machine."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
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


@dataclass(frozen=True)
class _WorkerSettings:
    """What every worker needs to know."""

    load: Callable[[], Captioner]
    options: BulkOptions
    output: OutputOptions
    folder: ShardFolder
    cores: int


class _ShardWorker:
    """An actor of Ray Data, which captions shards with one model."""

    def __init__(self, settings: _WorkerSettings):
        self.settings = settings
        self.captioner: Captioner | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """One row in, with a shard; one row out, with its report or the error that ends the run."""
        (shard,) = batch["shard"]
        settings = self.settings
        try:
            self.captioner = self.captioner or settings.load()
            report = caption_shard(
                self.captioner, shard, settings.options, settings.output, settings.folder, settings.cores
            )
        except Exception as error:  # raised by the driver, without what Ray would wrap around it
            if not isinstance(error, NanoVLMError):
                error.add_note(f"in a worker:\n{traceback.format_exc()}")
            return {"result": [error]}
        return {"result": [report]}


def check_address(address: str | None) -> None:
    """Raise UsageError if nothing listens at HOST:PORT or ray://HOST:PORT, for which Ray itself waits two minutes."""
    if match := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address or ""):
        try:
            socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"Ray cluster {address}: {reason}; start one with ray start --head") from None


def _cluster(address: str | None) -> "_Cluster":
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray reads it when it is imported
    try:
        import ray.data
    except ImportError:
        raise MissingExtraError("captioning on a cluster needs Ray: pip install 'nanovlm[ray]'") from None
    return _Cluster(ray, address)


class _Cluster:
    """`with` it, this process is connected to a Ray cluster; a connection that exists already is used and kept."""

    def __init__(self, ray: Any, address: str | None):
        self.ray, self.address, self.is_ours = ray, address, not ray.is_initialized()

    def __enter__(self) -> Any:
        if self.is_ours:
            check_address(self.address)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                self.ray.init(self.address, logging_level="error", log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise UsageError(f"Ray cluster {self.address or 'auto'}: {reason}") from None
        return self.ray

    def __exit__(self, *error: object) -> None:
        if self.is_ours:
            self.ray.shutdown()


def _run(ray: Any, shards: Sequence[Shard], workers: Workers, settings: _WorkerSettings) -> list[ShardReport]:
    """Caption the shards; returns the reports of those that were finished."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    dataset = ray.data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
    results = dataset.map_batches(
        _ShardWorker,
        batch_size=1,
        batch_format="numpy",
        fn_constructor_args=(settings,),
        compute=ray.data.ActorPoolStrategy(size=min(workers.count, len(shards)), max_tasks_in_flight_per_actor=1),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus or None,
    )  # Ray Data restarts an actor that died, and gives its shard to another
    reports: list[ShardReport] = []
    failed = 0
    with Progress(len(shards), unit="shard") as progress:
        try:
            for row in results.iter_rows():
                if isinstance(result := row["result"], Exception):
                    raise result
                reports.append(result)
                failed += len(result.failures)
                for failure in result.failures:
                    name = "/".join(filter(None, (failure["file_name"], failure.get("member"))))
                    logger.warning("%s: %s", printable(name), failure["reason"])
                progress.update(failed)
        except KeyboardInterrupt:
            logger.warning("stopped after %d of %d shards; run the same command to resume", len(reports), len(shards))
            raise
        except ray.exceptions.RayError as error:
            raise NanoVLMError(
                f"the Ray cluster failed after {len(reports)} of {len(shards)} shards: "
                f"{str(error).strip().partition(chr(10))[0]}; run the same command to resume"
            ) from error
    return reports
