"""Packing: several examples in one row, which neither see nor shift each other. Less padding, the same losses."""

from collections.abc import Sequence

from models.language_model import PACK_STRIDE
from nanovlm.data.examples import EncodedExample


def pack(rows: Sequence[EncodedExample], max_length: int) -> list[EncodedExample]:
    """Join rows into fewer ones of at most max_length tokens; a row that is longer by itself stays as it is.

    Best fit decreasing (Johnson 1974): the longest first, each into the bin with the least room left over.
    """
    bins: list[list[EncodedExample]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        fitting = [i for i in range(len(bins)) if room[i] >= len(row.ids)]
        if fitting:
            best = min(fitting, key=lambda i: room[i])
        else:
            best = len(bins)
            bins.append([])
            room.append(max_length)
        bins[best].append(row)
        room[best] -= len(row.ids)
    return [join(rows_of_bin) for rows_of_bin in bins]


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
