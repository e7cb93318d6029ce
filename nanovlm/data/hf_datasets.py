"""Datasets read with the `datasets` library: folders of `save_to_disk`, parquet and arrow files, or the Hub."""

import copy
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanovlm.data.formats import applicable_options, passes_ratings, record_to_example
from nanovlm.data.remote import first_line, stream_errors
from nanovlm.data.source import INSTALL_DATA, ReadOptions, Source, Stream
from nanovlm.errors import DataError, MissingExtraError


def open_dataset(path: str, options: ReadOptions, files: Sequence[str] = ()) -> Source | Stream:
    """The rows of parquet or arrow files, of a folder that `save_to_disk` wrote, or of a Hub dataset owner/name.

    owner/name:subset names one of its subsets. Its split "train" is read, or its only one.
    """
    on_hub = not Path(path).exists() and not any(Path(file).exists() for file in files)  # or at another address
    dataset = _select_split(path, _load(path, options, files, on_hub))
    column_names = dataset.column_names or list(next(iter(dataset), {}))
    supported = _check_columns(path, column_names, options)
    dataset = _without_decoding(dataset)
    make_example = partial(record_to_example, root=None, options=options)
    if on_hub and options.stream:
        keep_row = partial(passes_ratings, options=options)
        shards = [partial(_read_shard, path, dataset, i) for i in range(dataset.num_shards)]
        return Stream(path, shards, make_example, keep_row, supported_options=[*supported, "stream"])
    if not len(dataset):
        raise DataError(f"no images found: {path} has no rows")
    nbytes = dataset.data.nbytes
    record_numbers = None
    if options.min_ratings and "texts" in column_names:
        rated = dataset.select_columns(["texts", *(f"{rating}_ratings" for rating in options.min_ratings)])
        record_numbers = [i for i, row in enumerate(rated) if passes_ratings(row, options)]
        if not record_numbers:
            raise DataError(f"{path} has no row rated so high; lower --min-rating")
        dataset = dataset.select(record_numbers)
    return Source(
        path, dataset, make_example, supported_options=supported, record_numbers=record_numbers, nbytes=nbytes
    )


def _load(path: str, options: ReadOptions, files: Sequence[str], on_hub: bool) -> Any:
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


def _check_columns(path: str, columns: Collection[str], options: ReadOptions) -> Sequence[str]:
    """The options that apply to rows of these columns; DataError if no example can be made of them."""
    if "__key__" in columns:
        raise DataError(f"{path} holds webdataset tars; name them: --data 'hf://datasets/{path}/**.tar' --stream")
    if "texts" not in columns and not {"image", "images"} & set(columns):
        raise DataError(f"no images found: {path} has no column image or images, only {', '.join(sorted(columns))}")
    return applicable_options(columns, path, options)


def _read_shard(path: str, dataset: Any, i: int) -> Iterator[dict[str, Any]]:
    """The rows of one shard of a streamed dataset.

    `iter(dataset)` would distribute the shards among DataLoader workers; here `Stream` does, so that a batch is a
    function of its number.
    """
    with stream_errors(path):
        for batch in dataset.shard(dataset.num_shards, i).iter(batch_size=1):
            yield {name: values[0] for name, values in batch.items()}


def _without_decoding(dataset: Any) -> Any:
    """The same rows with images as their bytes, so that a broken one is an ExampleError that names it."""
    import datasets

    def disable_decoding(feature: Any) -> bool:
        """Switch off the decoding of images in a feature; returns whether it holds any."""
        if isinstance(feature, datasets.Image):
            feature.decode = False
            return True
        inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
        holds_image = [disable_decoding(one) for one in inner if one is not None]
        return any(holds_image)

    for name, feature in (dataset.features or {}).items():
        changed = copy.deepcopy(feature)
        if disable_decoding(changed):
            dataset = dataset.cast_column(name, changed)
    return dataset
