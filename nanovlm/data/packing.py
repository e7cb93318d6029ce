"""Packing: several examples in one row, which neither see nor shift each other. Less padding, the same losses."""

from collections.abc import Sequence

from models.language_model import PACK_STRIDE
from nanovlm.data.examples import EncodedExample


def pack(rows: Sequence[EncodedExample], max_length: int) -> list[EncodedExample]:
    """Join rows into fewer ones of at most max_length tokens; a row that is longer by itself stays as it is.

    Best fit decreasing (Johnson 1974): the longest first, each into the bin with the least room left over.
    """
    bins: list[list[EncodedExample]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        fitting = [one for one in bins if _length(one) + len(row.ids) <= max_length]
        if fitting:
            max(fitting, key=_length).append(row)
        else:
            bins.append([row])
    return [join(one) for one in bins]


def _length(rows: Sequence[EncodedExample]) -> int:
    return sum(len(row.ids) for row in rows)


def join(rows: Sequence[EncodedExample]) -> EncodedExample:
    """Concatenate rows; mask values PACK_STRIDE apart keep their samples from attending to each other."""
    joined, samples = EncodedExample(), 0
    for row in rows:
        joined.ids.extend(row.ids)
        joined.targets.extend(row.targets)
        joined.mask.extend(value + samples * PACK_STRIDE for value in row.mask)
        joined.images.extend(row.images)
        samples = joined.mask[-1] // PACK_STRIDE + 1
    return joined
