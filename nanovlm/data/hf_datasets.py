"""Datasets read with the `datasets` library: tar, parquet and arrow files, folders of `save_to_disk`, or the Hub."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.formats import applicable_options, record_to_example
from nanovlm.data.source import Source, Stream
from nanovlm.errors import INSTALL_DATA, DataError, MissingExtraError, first_line
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions

BUILDERS = {"tar": "webdataset", "parquet": "parquet", "arrow": "arrow"}  # of `datasets`, by a file's extension
EXTENSION = re.compile(rf"\.({'|'.join(BUILDERS)})(\?[^/]*)?$", re.IGNORECASE)  # an address may have a query


def builder_of(file: str) -> str | None:
    """Name of the `datasets` builder that reads a file or an address."""
    match = EXTENSION.search(file)
    return BUILDERS[match[1].lower()] if match else None


def open_dataset(path: str, files: Sequence[str], options: ReadOptions) -> Source | Stream:
    """The rows of files or, without any, of a folder of `save_to_disk` or a Hub dataset owner/name.

    owner/name:subset names one of its subsets. Its split "train" is read, or its only one.
    """
    dataset = _select_split(path, _load(path, files, options))
    columns = dataset.column_names or list(next(iter(dataset), {}))
    make_example = partial(record_to_example, root=None, options=options)
    if "__key__" in columns:  # the samples of webdataset tars
        columns = _sample_columns(path, dataset.features)
        make_example = partial(_sample_to_example, options=options)
    supported = applicable_options(columns, path, options)
    dataset = dataset.with_format("arrow")  # images stay bytes, so that a broken one is an error that names its row
    if not hasattr(dataset, "data"):  # it is streamed
        shards = [partial(_read_shard, dataset, i) for i in range(dataset.num_shards)]
        return Stream(path, shards, make_example, [*supported, "stream"])
    if not len(dataset):
        raise DataError(f"no images found: {path} has no rows; name another")
    return Source(path, _Rows(dataset), make_example, supported_options=supported, nbytes=dataset.data.nbytes)


def _sample_columns(path: str, features: Mapping[str, Any]) -> list[str]:
    """The columns of the records that samples of these features are, see `_sample_to_example`."""
    found = ", ".join(name for name in features if not name.startswith("__"))
    if not any(map(_is_image, features)):
        raise DataError(f"no images found: {path} has samples of {found} only; name another path")
    if "txt" in features:
        return ["images", "text"]
    if isinstance(features.get("json"), Mapping):
        return ["images", *features["json"]]
    raise DataError(f"captions missing: {path} has samples of {found} only; write a .txt or a .json into each")


def _sample_to_example(sample: Mapping[str, Any], name: str, options: ReadOptions) -> Example:
    """The example of a sample of a webdataset tar: its images with its .txt, or with the record in its .json."""
    name = f"{name} {sample['__key__']}"
    images = [sample[column] for column in sorted(sample) if _is_image(column) and sample[column] is not None]
    if not images:
        raise ExampleError(f"{name} has no image of the type that the first samples have; write one, or remove it")
    record = {"text": sample["txt"]} if "txt" in sample else sample["json"] or {}
    return record_to_example(record | {"images": images}, name, None, options)


def _is_image(column: str) -> bool:
    return f".{column.rpartition('.')[2].lower()}" in readable_extensions()


class _Rows(Sequence[dict[str, Any]]):
    """The rows of a dataset in Arrow's format as Python objects; numbers of classes become their names."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        features = (dataset.features or {}).items()
        self.classes = {column: feature.names for column, feature in features if hasattr(feature, "names")}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> Any:
        return self._named(self.dataset[i].to_pylist()[0])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for table in self.dataset.iter(batch_size=1000):
            yield from map(self._named, table.to_pylist())

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        numbers = {column: row[column] for column in self.classes if (row.get(column) or 0) >= 0}
        return row | {column: self.classes[column][n] for column, n in numbers.items() if n is not None}


def _load(path: str, files: Sequence[str], options: ReadOptions) -> Any:
    """A Dataset, IterableDataset or a dict of them by split."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"{path} is read with the datasets library: {INSTALL_DATA}") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    try:
        if files:
            return datasets.load_dataset(builder_of(files[0]), data_files=list(files), streaming=options.stream)
        if os.path.isdir(path):
            return datasets.load_from_disk(path)
        name, _, subset = path.partition(":")
        return datasets.load_dataset(name, subset or None, streaming=options.stream)
    except Exception as error:  # the library raises errors of many kinds, from DNS to disk
        is_wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = first_line(error.__cause__ or error if is_wrapped else error)
        hint = "write or download it again" if os.path.exists(path) else "if you are offline, name a local folder"
        raise DataError(f"{path}: the datasets library cannot read it: {reason}; {hint}") from None


def _select_split(path: str, dataset: Any) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if "train" not in dataset and len(dataset) > 1:
        raise DataError(f"{path} has no split 'train', only {', '.join(dataset)}; save the one you mean by itself")
    return dataset.get("train", next(iter(dataset.values())))


def _read_shard(dataset: Any, i: int) -> Iterator[dict[str, Any]]:
    """The rows of one shard of a streamed dataset.

    `iter(dataset)` would distribute the shards among DataLoader workers; here `Stream` does, so that a batch is a
    function of its number.
    """
    for table in dataset.shard(dataset.num_shards, i).iter(batch_size=1):
        yield from table.to_pylist()
