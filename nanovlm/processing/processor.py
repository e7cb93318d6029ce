"""Processor: from images and text to the token ids and tiles that the model reads.

How a format lays out images and prompts is its layout's, see `nanovlm.processing.layouts`.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.config import VLMConfig
from models.inference.caches import TiledImage
from nanovlm.errors import InputError, PromptTooLongError
from nanovlm.processing.conversation import Chat, check_chat, dialogue, images_of
from nanovlm.processing.layouts import layout_of
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
            raise InputError(f"{max_tiles} is less than 1; with 1 an image is resized to one tile", field="max_tiles")
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.max_tiles = max_tiles
        self.layout = layout_of(cfg)

    @property
    def max_tiles_per_image(self) -> int:
        """The largest number of tiles of one image, global view included."""
        return self.layout.max_tiles_per_image(self.max_tiles)

    def check_bytes(self, texts: Iterable[str], n_images: int = 0) -> None:
        """Refuse texts and images that cannot fit the context, whatever their tokens, before any work on them."""
        context = self.cfg.lm_max_position_embeddings
        n_tokens = n_images * self.cfg.mp_image_token_length
        self.cfg.validate_length(
            n_tokens, 1, f"{n_images:,} images of at least {n_tokens:,} tokens", "use fewer images"
        )
        limit = context * self.tokenizer.longest_token
        if (n_bytes := sum(len(text.encode(errors="replace")) for text in texts)) > limit:
            raise PromptTooLongError(
                f"prompt is too long: {n_bytes:,} bytes of text, which are more than the model's context "
                f"(lm_max_position_embeddings={context}); shorten it"
            )

    def tiled(self, image: Image.Image, max_tiles: int | None = None, **key: Any) -> TiledImage:
        """Tiles of an RGB image, (n, 3, S, S) float32, and their grid; whatever the format adds to them is in n."""
        tiles, grid = self.layout.preprocess(image, max_tiles or self.max_tiles)
        return TiledImage(tiles, grid=grid, **key)

    def prepare(self, images: "Sequence[Image.Image | Video]") -> list[Any]:
        """The parts of a turn that shows images, a `TiledImage` for each, or a video.

        A video's frame is one tile. SmolVLM2 reads texts around frames; in other layouts frames are images.
        """
        videos = [image for image in images if not isinstance(image, Image.Image)]
        if not videos:
            return [self.tiled(image) for image in images]  # type: ignore[arg-type]
        if len(images) > 1:
            raise InputError(f"{len(images)} images and videos together; ask about one video, or about images")
        frames = [self.tiled(frame, 1) for frame in videos[0].frames]
        if not self.layout.images_in_turns:
            return frames
        *before, last = videos[0].texts()
        return [*chain.from_iterable(zip(before, frames)), last]

    def __call__(self, images: Sequence[Sequence[Image.Image]], questions: Sequence[str]) -> dict[str, Tensor | None]:
        """Inputs of `VisionLanguageModel.generate`: row i asks questions[i] about images[i], padded on the left.

        input_ids and attention_mask (B, T) int64; images (N, 3, S, S), the tiles of all rows, or None.
        """
        if len(images) != len(questions):
            raise InputError(f"{len(images)} rows of images, but {len(questions)} prompts; pass one prompt a row")
        chats = [dialogue([question], self.prepare(row)) for row, question in zip(images, questions)]
        ids = [torch.tensor(self.encode(chat)) for chat in chats]
        tiles = [image.tiles for chat in chats for image in images_of(chat)]
        pad = self.tokenizer.eos_token_id  # any id would do: the mask hides it
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left"),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True, padding_side="left"),
            "images": torch.cat(tiles) if tiles else None,
        }

    def encode(self, chat: Chat, default: str | None = None) -> list[int]:
        """Token ids of a conversation about `TiledImage`s up to where the answer begins.

        default, if given, stands for a question without text. InputError for a conversation without a question.
        """
        check_chat(chat)
        turns = self.layout.arrange(chat, default)
        self.check_bytes(part for turn in turns for part in turn.parts if isinstance(part, str))
        if not self.layout.has_chat:
            return self._encode_completion(turns)
        return self.tokenizer.encode_chat(turns, self.layout.image_markups([one.grid for one in images_of(turns)]))

    def _encode_completion(self, turns: Chat) -> list[int]:
        """The prompt of a layout without a chat."""
        ids = [self.tokenizer.image_token_id] * (self.cfg.mp_image_token_length * len(images_of(turns)))
        ids = ids + self.tokenizer.begin([]) if self.cfg.vlm_extra_tokens is None else self.tokenizer.begin(ids)
        for turn in turns:
            if turn.role == "user":
                ids += self.tokenizer.encode(f"Question: {turn.text} Answer:")
            else:
                ids += [*self.tokenizer.encode(turn.text), self.tokenizer.eos_token_id]
        return ids


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
