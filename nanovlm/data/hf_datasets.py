"""Datasets read with the `datasets` library: folders of `save_to_disk`, parquet and arrow files, or the Hub."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanovlm.data.formats import applicable_options, record_to_example
from nanovlm.data.remote import INSTALL_DATA, first_line
from nanovlm.data.source import Source, Stream
from nanovlm.errors import DataError, MissingExtraError
from nanovlm.options import ReadOptions


def open_dataset(path: str, files: Sequence[str], options: ReadOptions) -> Source | Stream:
    """The rows of parquet or arrow files or, without files, of a folder of `save_to_disk` or a Hub dataset owner/name.

    owner/name:subset names one of its subsets. Its split "train" is read, or its only one.
    """
    on_hub = not Path(path).exists() and not any(Path(file).exists() for file in files)  # or at another address
    dataset = _select_split(path, _load(path, files, options, on_hub))
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if "__key__" in columns:
        raise DataError(f"{path} holds webdataset tars; name them: --data 'hf://datasets/{path}/**.tar' --stream")
    supported = applicable_options(columns, path, options)
    dataset = dataset.with_format("arrow")  # images stay bytes, so that a broken one is an error that names its row
    make_example = partial(record_to_example, root=None, options=options)
    if on_hub and options.stream:
        shards = [partial(_read_shard, dataset, i) for i in range(dataset.num_shards)]
        return Stream(path, shards, make_example, [*supported, "stream"])
    if not len(dataset):
        raise DataError(f"no images found: {path} has no rows; name another")
    return Source(path, _Rows(dataset), make_example, supported_options=supported, nbytes=dataset.data.nbytes)


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


def _load(path: str, files: Sequence[str], options: ReadOptions, on_hub: bool) -> Any:
    """A Dataset, IterableDataset or a dict of them by split."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"{path} is read with the datasets library: {INSTALL_DATA}") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    try:
        if files:
            builder = "arrow" if files[0].endswith(".arrow") else "parquet"
            return datasets.load_dataset(builder, data_files=list(files), streaming=on_hub and options.stream)
        if on_hub:
            name, _, subset = path.partition(":")
            return datasets.load_dataset(name, subset or None, streaming=options.stream)
        return datasets.load_from_disk(path)
    except Exception as error:  # the library raises errors of many kinds, from DNS to disk
        hint = "if you are offline, name a local folder" if on_hub else "write or download it again"
        raise DataError(f"{path}: the datasets library cannot read it: {first_line(error)}; {hint}") from None


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
