"""Training examples: a picture with questions and answers, as the ids, targets and images a step learns from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from nanovlm.processor import Processor

IGNORED = -100  # a target that asks for nothing
MULTIPLE = 8  # batches are a multiple of this long, so that a compiled step meets few different shapes


@dataclass(frozen=True)
class Example:
    """Pictures and, about them, pairs of a prompt and its answer; each pair stands for itself."""

    pictures: Sequence[Image.Image]
    answers: Sequence[tuple[str, str]]
    name: str = "example"


@dataclass(frozen=True)
class Row:
    """An example encoded: ids, targets and mask of equal length, and the tiles of its pictures."""

    ids: list[int]
    targets: list[int]
    mask: list[int]
    images: list[Tensor]


def encode(example: Example, processor: Processor) -> Row:
    """Read the pictures once, as the trunk (mask 1), and hang each question on it as a branch (mask 2, 3, ...).

    A branch reads exactly the ids that generation would read and say for that question alone; see
    `models.language_model.visible`.
    """
    tokenizer = processor.tokenizer
    tiles = [processor.images(picture) for picture in example.pictures]
    grids = [grid for _, grid in tiles]
    ids, targets, mask = [], [], []
    for branch, (prompt, answer) in enumerate(example.answers, start=2):
        read = processor.prompt(grids, prompt)
        said = tokenizer.encode(answer) + [tokenizer.eos_token_id]
        trunk = len(read) - read[::-1].index(tokenizer.image_token_id) if grids else 0
        if not ids:
            ids, targets, mask = read[:trunk], [IGNORED] * trunk, [1] * trunk
        ids += read[trunk:] + said[:-1]
        targets += [IGNORED] * (len(read) - trunk - 1) + said
        mask += [branch] * (len(read) - trunk + len(said) - 1)
    if not any(target != IGNORED for target in targets):
        raise ValueError(f"{example.name} has no answer to learn")
    return Row(ids, targets, mask, [tile for tile, _ in tiles])


def collate(rows: Sequence[Row], pad: int = 0, limit: int | None = None) -> dict[str, Tensor | None]:
    """A batch for the model's forward: input_ids, targets and attention_mask (B, T), images (N, 3, S, S) or None.

    T is the longest row's length, rounded up to a MULTIPLE but not beyond limit, the positions that the model has.
    """
    longest = max(len(row.ids) for row in rows)
    rounded = -(-longest // MULTIPLE) * MULTIPLE
    if limit is None or rounded <= limit:
        longest = rounded

    def padded(values: str, filler: int) -> Tensor:
        return torch.tensor([getattr(row, values) + [filler] * (longest - len(row.ids)) for row in rows])

    images = [tile for row in rows for tile in row.images]
    return {
        "input_ids": padded("ids", pad),
        "targets": padded("targets", IGNORED),
        "attention_mask": padded("mask", 0),
        "images": torch.cat(images) if images else None,
    }
