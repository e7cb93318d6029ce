"""Training examples: images with questions and answers, encoded as the token ids, targets and tiles of a step."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from models.language_model import PACK_STRIDE
from models.vision_language_model import IGNORE_INDEX
from nanovlm.errors import DataError, ImageError, PromptTooLongError
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.processor import Processor

PAD_MULTIPLE = 8  # batch lengths are multiples of this, so that a compiled step meets few different shapes

ImageSource = Image.Image | str | os.PathLike[str] | bytes
Augment = Callable[[Image.Image], Image.Image]


class ExampleError(DataError):
    """An example that cannot be used for training; the message is one line that names the example and the reason."""


@dataclass(frozen=True)
class Example:
    """Images, opened when the example is encoded, and (prompt, answer) pairs about them.

    The pairs are independent of each other or, if multi_turn, the turns of one conversation. learned says of each pair
    whether its answer is trained on, or is context only; () is all.
    """

    images: Sequence[ImageSource]
    qa_pairs: Sequence[tuple[str, str]]
    name: str = "example"
    multi_turn: bool = False
    learned: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()  # what of its row was read, and what was not

    def is_learned(self, k: int) -> bool:
        """True if the k-th answer is trained on."""
        return not self.learned or self.learned[k]


def check_answers(example: Example) -> None:
    """ExampleError for no answer or an empty one, which teaches nothing and is no reference."""
    if not any(map(example.is_learned, range(len(example.qa_pairs)))):
        raise ExampleError(f"{example.name} has no answer to learn; write one, or remove it")
    for k, (prompt, answer) in enumerate(example.qa_pairs):
        if example.is_learned(k) and not answer.strip():
            raise ExampleError(f"{example.name} has an empty answer to {prompt!r}; write it, or remove the example")


@dataclass
class EncodedExample:
    """Token ids, targets and segments (attention mask values), all of length T, and tiles (n, 3, S, S) per image.

    targets[t] is the id that ids[t] should predict. mask is 1 for the shared prefix and k + 2 for the k-th
    continuation; see `models.language_model.build_attention_mask`.
    """

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)

    def add(self, ids: Sequence[int], targets: Sequence[int], mask: Iterable[int]) -> None:
        """Add ids with their targets and mask values."""
        self.ids += ids
        self.targets += targets
        self.mask += mask


def encode(example: Example, processor: Processor, augment: Augment | None = None) -> EncodedExample:
    """Encode an example so that each answer is predicted from exactly the ids that generation would have seen.

    The images are the shared prefix (mask 1); each pair is a continuation of it (mask 2, 3, ...) that does not see the
    others. A multi-turn example is one continuation, whose answers follow the turns before them. augment, if given, is
    applied to each image. ExampleError if an image cannot be read, an answer is missing, or the row is too long.
    """
    check_answers(example)
    images = [_load(image, example.name) for image in example.images]
    tiles, grids, _ = processor.preprocess_all(images if augment is None else list(map(augment, images)))
    row = EncodedExample(images=tiles)
    image_token = processor.tokenizer.image_token_id
    last_id: list[int] = []  # of the answer before, which is a target only
    for k, (prompt, answer) in enumerate(example.qa_pairs):
        if not (example.multi_turn or example.is_learned(k)):
            continue
        try:
            ids = processor.encode_prompt(grids, prompt, list(example.qa_pairs[:k]) if example.multi_turn else [])
        except PromptTooLongError as error:
            raise ExampleError(f"{example.name}: {error}") from None
        start = len(ids) - ids[::-1].index(image_token) if image_token in ids else 0  # behind the shared prefix
        if not row.ids:
            row.add(ids[:start], [IGNORE_INDEX] * start, [1] * start)
        elif example.multi_turn:
            start = len(row.ids)
            if ids[: start + 1] != row.ids + last_id:
                raise ExampleError(
                    f"{example.name}: in turn {k + 1} the model would read an earlier answer differently than it "
                    "learned it, as the chat template or the tokenizer changes it; split it into single questions"
                )
        answer_ids = processor.tokenizer.encode_answer(answer)
        last_id = answer_ids[-1:]
        learned_ids = answer_ids if example.is_learned(k) else [IGNORE_INDEX] * len(answer_ids)
        targets = [*[IGNORE_INDEX] * (len(ids) - start - 1), *learned_ids]
        row.add([*ids[start:], *answer_ids[:-1]], targets, [2 if example.multi_turn else k + 2] * len(targets))
    limit = processor.cfg.lm_max_position_embeddings
    if len(row.ids) > limit:
        image_tokens = sum(map(len, row.images)) * processor.cfg.mp_image_token_length
        raise ExampleError(
            f"{example.name} takes {len(row.ids)} tokens, {image_tokens} of them for images, but "
            f"lm_max_position_embeddings={limit}; shorten its text or split it"
        )
    return row


def _load(image: ImageSource, name: str) -> Image.Image:
    try:
        return load_image(image, None if isinstance(image, (str, os.PathLike)) else name)
    except ImageError as error:
        raise ExampleError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None


def collate(rows: Sequence[EncodedExample], pad_id: int = 0, max_length: int | None = None) -> dict[str, Tensor | None]:
    """A batch for the model's forward: input_ids, targets and attention_mask (B, T), images (N, 3, S, S) or None.

    T is the longest row's length, rounded up to a multiple of PAD_MULTIPLE, but to max_length at most.
    """
    longest = max(len(row.ids) for row in rows)
    rounded = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    length = max(longest, min(rounded, max_length or rounded))

    def pad(lists: Sequence[list[int]], value: int) -> Tensor:
        return torch.tensor([values + [value] * (length - len(values)) for values in lists])

    images = [tile for row in rows for tile in row.images]
    return {
        "input_ids": pad([row.ids for row in rows], pad_id),
        "targets": pad([row.targets for row in rows], IGNORE_INDEX),
        "attention_mask": pad([row.mask for row in rows], 0),
        "images": torch.cat(images) if images else None,
    }


def pack(rows: Sequence[EncodedExample], max_length: int) -> list[EncodedExample]:
    """Join rows into fewer ones of at most max_length tokens; a row that is longer by itself stays as it is.

    Best fit decreasing (Johnson 1974): the longest first, each into the row with the least room left over. Mask values
    PACK_STRIDE apart keep samples from attending to each other: less padding, the same losses.
    """
    packed: list[EncodedExample] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        fitting = [one for one in packed if len(one.ids) + len(row.ids) <= max_length]
        if not fitting:
            packed.append(EncodedExample())
        joined = max(fitting, key=lambda one: len(one.ids)) if fitting else packed[-1]
        offset = (joined.mask[-1] // PACK_STRIDE + 1) * PACK_STRIDE if joined.mask else 0
        joined.add(row.ids, row.targets, [value + offset for value in row.mask])
        joined.images += row.images
    return packed


@dataclass(frozen=True)
class Question:
    """A prompt about images, after earlier turns of a chat if any, and all reference answers to it."""

    source: str
    name: str
    images: Sequence[ImageSource]
    prompt: str
    references: list[str]
    history: Sequence[tuple[str, str]] = ()


def questions(examples: Iterable[tuple[str, Example]]) -> list[Question]:
    """The questions of examples of named sources; all answers to one prompt about the same images are its references.

    In a chat each turn is a question, with the reference answers before it as history. Masked answers are not asked.
    """
    asked: dict[Any, Question] = {}
    for number, (source, example) in enumerate(examples):
        images = tuple(number if isinstance(image, Image.Image) else image for image in example.images)
        for k, (prompt, answer) in enumerate(example.qa_pairs):
            if not example.is_learned(k):
                continue
            history = tuple(example.qa_pairs[:k]) if example.multi_turn else ()
            key = (source, images or number, prompt, history)
            question = Question(source, example.name, example.images, prompt, [], history)
            asked.setdefault(key, question).references.append(answer)
    return list(asked.values())
