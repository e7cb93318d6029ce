"""Processor: from images and text to the token ids and tiles that the model reads.

How a format lays out images and prompts is its layout's, see `nanovlm.processing.layouts`.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import cycle, islice, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.config import VLMConfig
from nanovlm.errors import InputError, PromptTooLongError
from nanovlm.processing.layouts import Grid, Message, layout_of
from nanovlm.processing.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovlm.processing.video import Video


class Processor:
    """Prepares images and prompts in the layout that the checkpoint was trained with.

    max_tiles limits the cost of an image: it has at most that many tiles, beside the global view. The model then sees
    less detail.
    """

    def __init__(self, cfg: VLMConfig, tokenizer: Tokenizer, max_tiles: int | None = None):
        if max_tiles is not None and max_tiles < 1:
            raise InputError(f"max_tiles={max_tiles} is less than 1; with 1 an image is resized to one tile")
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.max_tiles = max_tiles
        self.layout = layout_of(cfg)

    @property
    def max_tiles_per_image(self) -> int:
        """The largest number of tiles of one image, global view included."""
        return self.layout.max_tiles_per_image(self.max_tiles)

    def check_bytes(self, texts: Iterable[str]) -> None:
        """Refuse texts that cannot fit the context, whatever their tokens: tokenizing megabytes takes seconds."""
        context = self.cfg.lm_max_position_embeddings
        limit = context * self.tokenizer.longest_token
        if (n_bytes := sum(len(text.encode(errors="replace")) for text in texts)) > limit:
            raise PromptTooLongError(
                f"prompt is too long: {n_bytes:,} bytes of text, which are more than the model's context "
                f"(lm_max_position_embeddings={context}); shorten it"
            )

    def preprocess(self, image: Image.Image, max_tiles: int | None = None) -> tuple[Tensor, Grid]:
        """Tiles of an RGB image, (n, 3, S, S) float32, and their grid; whatever the format adds to them is in n."""
        return self.layout.preprocess(image, max_tiles or self.max_tiles)

    def preprocess_all(self, images: "Sequence[Image.Image | Video]") -> tuple[list[Tensor], list[Grid], list[str]]:
        """Tiles and grids of images, or of one video's frames; and the texts around frames, as SmolVLM2 reads them.

        A frame is one tile. Other layouts than SmolVLM's have no texts: the frames are images.
        """
        texts: list[str] = []
        if videos := [image for image in images if not isinstance(image, Image.Image)]:
            if len(images) > 1:
                raise InputError(f"{len(images)} images and videos together; ask about one video, or about images")
            texts = videos[0].texts() if self.layout.images_in_turns else []
            prepared = [self.preprocess(frame, 1) for frame in videos[0].frames]
        else:
            prepared = [self.preprocess(image) for image in images]  # type: ignore[arg-type]
        return [tiles for tiles, _ in prepared], [grid for _, grid in prepared], texts

    def __call__(self, images: Sequence[Sequence[Image.Image]], questions: Sequence[str]) -> dict[str, Tensor | None]:
        """Inputs of `VisionLanguageModel.generate`: row i asks questions[i] about images[i], padded on the left.

        input_ids and attention_mask (B, T) int64; images (N, 3, S, S), the tiles of all rows, or None.
        """
        if len(images) != len(questions):
            raise InputError(f"{len(images)} rows of images, but {len(questions)} prompts; pass one prompt a row")
        rows = [self.encode(row, question) for row, question in zip(images, questions)]
        ids = [torch.tensor(row) for row, _ in rows]
        tiles = [image for _, row in rows for image in row]
        pad = self.tokenizer.eos_token_id  # any id would do: the mask hides it
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left"),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True, padding_side="left"),
            "images": torch.cat(tiles) if tiles else None,
        }

    def encode(self, images: "Sequence[Image.Image | Video]", question: str) -> tuple[list[int], list[Tensor]]:
        """Token ids of a question about images, any number of them, or a video; the tiles (n, 3, S, S) of each."""
        tiles, grids, texts = self.preprocess_all(images)
        return self.encode_prompt(grids, question, frame_texts=texts), tiles

    def encode_prompt(
        self,
        grids: Sequence[Grid],
        question: str,
        history: Sequence[tuple[str, str]] = (),
        frame_texts: Sequence[str] = (),
    ) -> list[int]:
        """Token ids of a question about images up to where the answer begins.

        history holds the questions and answers before it, oldest first; the images come before the first question, and
        frame_texts, if any, before each and after the last.
        """
        if not isinstance(question, str):
            raise InputError(f"a prompt is one string, not {type(question).__name__}; pass earlier turns as history")
        self.check_bytes([question, *(text for pair in history for text in pair)])
        if not self.layout.has_chat:
            return self._encode_completion(len(grids), question, history)
        turns: list[list[Any]] = [[text] for pair in history for text in pair] + [[question]]
        before = [part for text in frame_texts[:-1] for part in (text, None)] or [None] * len(grids)
        turns[0] = [*before, "".join(frame_texts[-1:]) + turns[0][0]]
        return self.encode_turns(grids, list(zip(cycle(("user", "assistant")), turns)))

    def encode_turns(self, grids: Sequence[Grid], turns: Sequence[tuple[str, Sequence[str | None]]]) -> list[int]:
        """Token ids of a chat of roles and parts: texts, and None for each image.

        Images stand before all text in a message, unless the layout has images_in_turns.
        """
        self.check_bytes(part for _, parts in turns for part in parts if part is not None)
        markups = iter(self.layout.image_markups(grids))
        messages: list[Message] = []
        for role, parts in turns:
            images = list(islice(markups, parts.count(None)))
            content = "\0".join(filter(None, parts))  # its special tokens are those of the parts
            messages.append({"role": role, "content": content, "images": images, "parts": parts})
        return self.tokenizer.encode_chat(messages)

    def _encode_completion(self, n_images: int, question: str, history: Sequence[tuple[str, str]]) -> list[int]:
        """The prompt of a layout without a chat."""
        ids = [self.tokenizer.image_token_id] * (self.cfg.mp_image_token_length * n_images)
        ids = ids + self.tokenizer.begin([]) if self.cfg.vlm_extra_tokens is None else self.tokenizer.begin(ids)
        for earlier, answer in history:
            ids += self.tokenizer.encode(f"Question: {earlier} Answer:") + self.tokenizer.encode(answer)
            ids.append(self.tokenizer.eos_token_id)
        return ids + self.tokenizer.encode(f"Question: {question} Answer:")


def pair_prompts(images: Iterable[Any], prompt: str | Iterable[str]) -> Iterator[tuple[Any, str]]:
    """Each image with its prompt; InputError if there are more of one than of the other."""
    if isinstance(prompt, str):
        yield from ((image, prompt) for image in images)
        return
    if isinstance(images, Sized) and isinstance(prompt, Sized) and len(images) != len(prompt):
        raise InputError(f"{len(images)} images, but {len(prompt)} prompts: pass one prompt for all, or one for each")
    missing: Any = object()
    for i, (image, text) in enumerate(zip_longest(images, prompt, fillvalue=missing)):
        if image is missing or text is missing:
            lacking = "image" if image is missing else "prompt"
            raise InputError(f"item {i + 1} has no {lacking}: pass one prompt for all images, or one for each")
        yield image, text
