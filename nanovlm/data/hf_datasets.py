"""Rows of a data set that the `datasets` library reads: the_cauldron's and FineVision's, chats, or plain columns."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanovlm.data.formats import CHATS, check_columns, columns, record_example, wanted
from nanovlm.data.source import COLUMNS, EXTRA, ReadOptions, Source, Stream
from nanovlm.errors import DataError


def rows(path: str, reading: ReadOptions, files: Sequence[str] = ()) -> Source | Stream:
    """The rows of a folder that `save_to_disk` wrote, of parquet or arrow files, or of a Hub data set owner/name.

    owner/name:subset names one of its subsets. Its split "train" is read, or its only one.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(f"{path} is read through the datasets library: {EXTRA}") from None
    hub = not (files or Path(path).exists())
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is told below, once
    try:
        if files:
            kind = "arrow" if files[0].endswith(".arrow") else "parquet"
            found = datasets.load_dataset(kind, data_files=list(files))
        elif hub:
            name, _, subset = path.partition(":")
            found = datasets.load_dataset(name, subset or None, streaming=reading.stream)
        else:
            found = datasets.load_from_disk(path)
    except Exception as error:  # of many kinds, from DNS to disk
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        way = "if you are offline, name a local folder" if hub else "write or download it again"
        raise DataError(f"{path}: the datasets library cannot read it: {reason}; {way}") from None
    if isinstance(found, dict):
        if "train" not in found and len(found) > 1:
            raise DataError(f"{path} has no split 'train', only {', '.join(found)}; save the one you mean by itself")
        found = found.get("train", next(iter(found.values())))
    names = found.column_names or list(next(iter(found), {}))
    _check(path, names, reading)
    found = undecoded(found)
    example = partial(record_example, root=None, reading=reading)
    obeys = ["min_ratings"] if "texts" in names else () if set(CHATS) & set(names) else COLUMNS
    if hub and reading.stream:
        return Stream(
            path, partial(_streamed, path, found), example, partial(wanted, reading=reading), obeys=[*obeys, "stream"]
        )
    if not len(found):
        raise DataError(f"no pictures found: {path} has no rows")
    nbytes = found.data.nbytes
    if not reading.min_ratings or "texts" not in names:
        return Source(path, found, example, obeys=obeys, nbytes=nbytes)
    asked = found.select_columns(["texts", *(f"{rating}_ratings" for rating in reading.min_ratings)])
    left = [i for i, row in enumerate(asked) if wanted(row, reading)]
    if not left:
        raise DataError(f"{path} has no row rated so high; lower --min-rating")
    return Source(path, found.select(left), example, numbers=left, obeys=obeys, nbytes=nbytes)


def _streamed(path: str, found: Any) -> Iterator[dict[str, Any]]:
    """All rows of a streamed data set, in every process: `iter(found)` would deal them out among the processes that
    prepare batches, each of which counts for itself and needs them all."""
    try:
        for batch in found.iter(batch_size=1):
            yield {name: values[0] for name, values in batch.items()}
    except Exception as error:  # of many kinds, from DNS to a broken file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"the stream of {path} broke off ({reason}); the same command goes on from the last checkpoint"
        ) from None


def _check(path: str, names: Iterable[str], reading: ReadOptions) -> None:
    """Refuse rows that no example could be made of, before any is read."""
    names = list(names)
    if "texts" in names:
        check_columns([f"{rating}_ratings" for rating in reading.min_ratings], names, path)
        return
    if not {"image", "images"} & set(names):
        raise DataError(f"no pictures found: {path} has no column image or images, only {', '.join(sorted(names))}")
    if not set(CHATS) & set(names):
        columns(names, path, reading)


def undecoded(found: Any) -> Any:
    """The same rows with pictures as their bytes, so that one that is broken is named and not a traceback."""
    import datasets

    def off(feature: Any) -> bool:
        if isinstance(feature, datasets.Image):
            feature.decode = False
            return True
        inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
        turned = [off(one) for one in inner if one is not None]
        return any(turned)

    for name, feature in (found.features or {}).items():
        plain = copy.deepcopy(feature)
        if off(plain):
            found = found.cast_column(name, plain)
    return found
