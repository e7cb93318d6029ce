"""Training examples: images with questions and answers, encoded as the token ids, targets and tiles of a step."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from models.language_model import PACK_STRIDE
from models.vision_language_model import IGNORE_INDEX
from nanovlm.errors import DataError, ImageError, InputError
from nanovlm.processing.conversation import Chat, images_first, images_of, with_images
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.processor import Processor

PAD_MULTIPLE = 8  # batch lengths are multiples of this, so that a compiled step meets few different shapes

ImageSource = Image.Image | str | os.PathLike[str] | bytes
Augment = Callable[[Image.Image], Image.Image]


class ExampleError(DataError):
    """An example that cannot be used for training; the message is one line that names the example and the reason."""


@dataclass(frozen=True)
class Example:
    """Images and conversations, each about all of the images, which are opened when the example is encoded.

    The conversations do not see each other. In their turns None marks the place of an image; images are in that order.
    """

    images: Sequence[ImageSource]
    chats: Sequence[Chat]
    name: str = "example"
    places: Mapping[str, str] = field(default_factory=dict)  # that its image, question and answer were read from
    notes: tuple[str, ...] = ()  # which columns were not read, and what else is worth a line
    split: str = ""  # that its row names

    def learned(self) -> list[tuple[Chat, int]]:
        """Each answer that is trained on, as its conversation and its place there."""
        turns = ((chat, i, turn) for chat in self.chats for i, turn in enumerate(chat))
        return [(chat, i) for chat, i, turn in turns if turn.role == "assistant" and turn.learned]

    def answers(self) -> list[str]:
        """The texts of the answers that are trained on."""
        return [chat[i].text for chat, i in self.learned()]


def check_answers(example: Example) -> None:
    """Raise ExampleError if an answer is missing or empty: it teaches nothing and is no reference."""
    if not example.learned():
        raise ExampleError(f"{example.name} has no answer to learn; write one, or remove it")
    for chat, i in example.learned():
        if not chat[i].text.strip():
            prompt = chat[i - 1].text
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

    Images stay in their places if the layout has images in turns; else all come first. What precedes the end of the
    last image is the shared prefix (mask 1); each conversation continues it (mask 2, 3, ...) and does not see the
    others. augment changes each image.
    """
    check_answers(example)
    image_token = processor.tokenizer.image_token_id
    row = EncodedExample()

    def check_length(n: int) -> None:
        n_image_tokens = sum(map(len, row.images)) * processor.cfg.mp_image_token_length
        what = f"{n} tokens, {n_image_tokens} of them for images,"
        processor.cfg.validate_length(n, 1, what, "shorten its text or split it")

    try:
        processor.check_bytes((turn.text for chat in example.chats for turn in chat), len(example.images))
        names = [None if isinstance(image, (str, os.PathLike)) else example.name for image in example.images]
        images = list(map(load_image, example.images, names))
        shown = processor.prepare(images if augment is None else list(map(augment, images)))
        row.images = [image.tiles for image in shown]
        for number, chat in enumerate(example.chats):
            if not any(turn.learned for turn in chat if turn.role == "assistant"):
                continue
            chat = with_images(chat, shown)
            chat = chat if processor.layout.images_in_turns else images_first(chat)
            if len(chat) > 3:  # encoded turn by turn, which takes long for more than fit
                check_length(len(processor.encode(chat[:-1])))
            ids, targets = _encode_chat(chat, processor)
            n = len(ids) - ids[::-1].index(image_token) if image_token in ids else 0
            if not row.ids:
                row.add(ids[:n], targets[:n], [1] * n)
            elif ids[:n] != row.ids[:n]:
                raise ExampleError("its conversations begin differently; split it")
            row.add(ids[n:], targets[n:], [number + 2] * len(ids[n:]))
            check_length(len(row.ids))
    except (ExampleError, ImageError, InputError) as error:
        message = str(error)
        raise ExampleError(message if message.startswith(example.name) else f"{example.name}: {message}") from None
    return row


def _encode_chat(chat: Chat, processor: Processor) -> tuple[list[int], list[int]]:
    """Ids of a conversation without the last one, and the targets."""
    ids: list[int] = []
    labels: list[int] = []
    for i, turn in enumerate(chat):
        if turn.role != "assistant":
            continue
        prompt = processor.encode(chat[:i])
        if prompt[: len(ids)] != ids:
            raise ExampleError(
                f"in turn {i} the model would read an earlier answer differently than it learned it, as the chat "
                "template or the tokenizer changes it; split it into single questions"
            )
        answer = processor.tokenizer.encode_answer(turn.text)
        labels += [IGNORE_INDEX] * (len(prompt) - len(ids))
        labels += answer if turn.learned else [IGNORE_INDEX] * len(answer)
        ids = prompt + answer
    return ids[:-1], labels[1:]


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
    """A conversation about images that ends with a question, and all reference answers to it."""

    source: str
    name: str
    images: Sequence[ImageSource]
    chat: Chat  # None marks the place of an image
    references: list[str]

    @property
    def prompt(self) -> str:
        return self.chat[-1].text


def questions(examples: Iterable[tuple[str, Example]]) -> list[Question]:
    """Questions of (source, example) pairs; all answers to one prompt about the same images are its references.

    In a chat each answer has a question, which follows the reference answers before. Masked answers are not asked.
    """
    asked: dict[Any, Question] = {}
    for number, (source, example) in enumerate(examples):
        for chat, i in example.learned():
            before = chat[:i]
            images = example.images[: len(images_of(before))]
            named = tuple(number if isinstance(image, Image.Image) else image for image in images)
            key = (source, named or number, tuple((turn.role, *turn.parts) for turn in before))
            question = Question(source, example.name, images, before, [])
            asked.setdefault(key, question).references.append(chat[i].text)
    return list(asked.values())
