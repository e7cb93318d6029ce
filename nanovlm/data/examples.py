"""Training examples: a picture with questions and answers, as the ids, targets and images a step learns from."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from nanovlm.errors import DataError, ImageError
from nanovlm.image_processing import load_image
from nanovlm.processor import Processor

IGNORE_INDEX = -100  # a target that asks for nothing
MULTIPLE = 8  # batches are a multiple of this long, so that a compiled step meets few different shapes


class ExampleError(DataError):
    """An example that nothing can be learned from; one line that names it and says why."""


@dataclass(frozen=True)
class Example:
    """Pictures, opened when they are encoded, and pairs of a prompt and its answer about them.

    Each pair stands for itself or, in a chain, follows those before it as the turns of one conversation.
    """

    pictures: Sequence[Image.Image | str | os.PathLike | bytes]  # or a file to read from
    answers: Sequence[tuple[str, str]]
    name: str = "example"
    chain: bool = False


@dataclass(frozen=True)
class EncodedExample:
    """An example encoded: ids, targets and mask of equal length, and the tiles of its pictures."""

    ids: list[int]
    targets: list[int]
    mask: list[int]
    images: list[Tensor]


View = Callable[[Image.Image], Image.Image]


def encode(example: Example, processor: Processor, view: View | None = None) -> EncodedExample:
    """Read the pictures once, as the trunk (mask 1), and hang each question on it as a branch (mask 2, 3, ...).

    A branch reads exactly the ids that generation would read and say for that question alone; see
    `models.language_model.visible`. A chain is one branch, whose later answers read the turns before them. view, if
    given, is how each picture is looked at.
    """
    tokenizer = processor.tokenizer
    pictures = [_opened(picture, example.name) for picture in example.pictures]
    tiles = [processor.preprocess(view(picture) if view else picture) for picture in pictures]
    grids = [grid for _, grid in tiles]
    ids, targets, mask, history = [], [], [], []
    for question, (prompt, answer) in enumerate(example.answers):
        read = processor.encode_prompt(grids, prompt, history)
        said = tokenizer.encode(answer) + [tokenizer.eos_token_id]
        trunk = len(read) - read[::-1].index(tokenizer.image_token_id) if grids and not history else 0
        if not ids:
            ids, targets, mask = read[:trunk], [IGNORE_INDEX] * trunk, [1] * trunk
        known = len(ids) if history else trunk
        if history and read[: known + 1] != ids + targets[-1:]:
            raise ExampleError(
                f"{example.name}: in its turn {question + 1} the model would read another answer before than it was "
                "taught, as its template or tokenizer changes it; split the conversation into single questions"
            )
        ids += read[known:] + said[:-1]
        targets += [IGNORE_INDEX] * (len(read) - known - 1) + said
        mask += [2 if example.chain else question + 2] * (len(read) - known + len(said) - 1)
        if example.chain:
            history.append((prompt, answer))
    if not any(target != IGNORE_INDEX for target in targets):
        raise ExampleError(f"{example.name} has no answer to learn")
    return EncodedExample(ids, targets, mask, [tile for tile, _ in tiles])


def _opened(picture, name: str) -> Image.Image:
    try:
        return load_image(picture, None if isinstance(picture, (str, os.PathLike)) else name)
    except ImageError as error:
        raise ExampleError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None


def encode_checked(example: Example, processor: Processor, view: View | None = None) -> EncodedExample:
    """`encode`, but whatever would silently teach something else than its writer meant is an ExampleError."""
    name, cfg = example.name, processor.cfg
    for prompt, answer in example.answers:
        if not answer.strip():
            raise ExampleError(f"{name} has an empty answer to {prompt!r}")
        for token in ("<image>", *(cfg.vlm_extra_tokens or {}).values()):
            for text, kind in ((prompt, "question"), (answer, "answer")):
                if token in text:
                    raise ExampleError(f"{name} has {token} in its {kind}, where it would be mere letters; take it out")
    row = encode(example, processor, view)
    if (length := len(row.ids)) > (limit := cfg.lm_max_position_embeddings):
        of_pictures = sum(map(len, row.images)) * cfg.mp_image_token_length
        raise ExampleError(
            f"{name} takes {length} tokens, {of_pictures} of them for pictures, but lm_max_position_embeddings="
            f"{limit}; shorten its text or split it"
        )
    return row


def collate(rows: Sequence[EncodedExample], pad: int = 0, limit: int | None = None) -> dict[str, Tensor | None]:
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
        "targets": padded("targets", IGNORE_INDEX),
        "attention_mask": padded("mask", 0),
        "images": torch.cat(images) if images else None,
    }
