"""Several examples in one row, none of which sees or shifts another: less padding, the same losses."""

from collections.abc import Sequence

from models.language_model import PACK_STRIDE
from nanovlm.data.examples import EncodedExample


def pack(rows: Sequence[EncodedExample], length: int) -> list[EncodedExample]:
    """Join rows into fewer of at most length tokens; one that is longer alone stays alone.

    Best fit, the longest first (Johnson 1974): each goes where the least room is left over.
    """
    packed: list[list[EncodedExample]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        fitting = [i for i in range(len(packed)) if room[i] >= len(row.ids)]
        if fitting:
            best = min(fitting, key=lambda i: room[i])
        else:
            best = len(packed)
            packed.append([])
            room.append(length)
        packed[best].append(row)
        room[best] -= len(row.ids)
    return [join(some) for some in packed]


def join(rows: Sequence[EncodedExample]) -> EncodedExample:
    """Rows one after another as one, each of whose samples `models.language_model.visible` keeps to itself."""
    ids, targets, mask, images, samples = [], [], [], [], 0
    for row in rows:
        ids += row.ids
        targets += row.targets
        mask += [value + samples * PACK_STRIDE for value in row.mask]
        images += row.images
        samples = mask[-1] // PACK_STRIDE + 1
    return EncodedExample(ids, targets, mask, images)
