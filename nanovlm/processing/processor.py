"""Processor: from images and text to the token ids and tiles that the model reads.

This is the one place where a checkpoint's format version (`VLMConfig.format_version`) decides the prompt's layout:

1   image embeddings come first and have no tokens of their own; then "Question: ... Answer:"
2   the same, with <|image|> tokens in the image positions
3   a chat, whose first user turn begins with the <|image|> tokens. Up to here an image is resized to one tile
4   an image is split into tiles; each tile's name precedes its <|image|> tokens; several images are numbered <image: 0>
5   the whole image, resized to one more tile and named <|global_image|>, precedes its tiles
6   transformers' SmolVLM and Idefics3, see `nanovlm.processing.smolvlm`: tiles by row and column, then the whole image
"""

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from models.config import VLMConfig
from nanovlm.errors import InputError
from nanovlm.processing import smolvlm as smolvlm_images
from nanovlm.processing.image_processing import preprocess, resized_size
from nanovlm.processing.tokenizer import Message, Tokenizer

EncodedPrompt = tuple[list[int], list[Tensor]]  # token ids, and the tiles (n, 3, S, S) of each image
Grid = tuple[int, int]  # rows and columns of an image's tiles


class Processor:
    """Prepares images and prompts in the layout that the checkpoint was trained with.

    max_tiles and upscale limit the cost of an image: at most max_tiles tiles, beside the global view, and with
    upscale=False no enlargement to the checkpoint's largest side first. The model then sees less detail.
    """

    def __init__(self, cfg: VLMConfig, tokenizer: Tokenizer, max_tiles: int | None = None, upscale: bool = True):
        if max_tiles is not None and max_tiles < 1:
            raise InputError(f"max_tiles={max_tiles} is less than 1; with 1 an image is resized to one tile")
        self.cfg, self.tokenizer, self.max_tiles, self.upscale = cfg, tokenizer, max_tiles, upscale

    @property
    def max_tiles_per_image(self) -> int:
        """The largest number of tiles of one image, global view included."""
        if self.cfg.smolvlm is not None:
            return smolvlm_images.max_tiles_per_image(self.cfg, self.cfg.smolvlm, self.max_tiles)
        tiles = ((self.cfg.max_img_size or self.cfg.vit_img_size) // self.cfg.vit_img_size) ** 2
        tiles = min(tiles, self.max_tiles or tiles)
        return tiles + 1 if self.cfg.format_version == 5 and tiles > 1 else tiles

    def preprocess(self, image: Image.Image) -> tuple[Tensor, Grid]:
        """Tiles of an RGB image, (n, 3, S, S) float32, and their grid.

        In nanoVLM's formats pixels are in [0, 1] and a global view comes first; in SmolVLM's they are normalized, and
        it comes last.
        """
        if self.cfg.smolvlm is not None:
            return smolvlm_images.preprocess(image, self.cfg, self.cfg.smolvlm, self.max_tiles, self.upscale)
        to_max_side = bool(self.cfg.resize_to_max_side_len) and self.upscale
        return preprocess(
            image,
            tile=self.cfg.vit_img_size,
            max_side=self._max_side(image.size, to_max_side),
            to_max_side=to_max_side,
            global_view=self.cfg.format_version == 5,
        )

    def encode(self, images: Sequence[Image.Image], question: str) -> EncodedPrompt:
        """Token ids and tiles of one question about images, any number of them."""
        tiles = [self.preprocess(image) for image in images]
        return self.encode_prompt([grid for _, grid in tiles], question), [one for one, _ in tiles]

    def encode_prompt(
        self,
        grids: Sequence[Grid],
        question: str,
        history: Sequence[tuple[str, str]] = (),
        images_per_turn: Sequence[int] | None = None,
    ) -> list[int]:
        """Token ids of a question about images up to where the answer begins.

        history holds the questions and answers before it, oldest first. images_per_turn says how many of the images
        each question brings, before its text; by default the first brings all. nanoVLM's formats were trained with all
        images before all text, so there it has no effect.
        """
        if not isinstance(question, str):
            raise InputError(f"a prompt is one string, not {type(question).__name__}; pass earlier turns as history")
        if self.cfg.format_version < 3:
            return self._encode_completion(len(grids), question, history)
        turns = [text for pair in history for text in pair] + [question]
        messages: list[Message] = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
        ]
        markups = iter(self.image_markups(grids))
        if self.cfg.smolvlm is not None and images_per_turn is not None:
            for message, n in zip(messages[::2], images_per_turn, strict=True):
                message["images"] = list(islice(markups, n))
        messages[0]["images"] = [*messages[0].get("images", ()), *markups]
        return self.tokenizer.encode_chat(messages)

    def image_markups(self, grids: Sequence[Grid]) -> list[str]:
        """The text that stands for each image in a chat: the names of its tiles, each followed by its image tokens."""
        if self.cfg.smolvlm is not None:
            return [smolvlm_images.markup(grid, self.cfg, self.cfg.smolvlm) for grid in grids]
        tokens, format_version = self.cfg.special_tokens, self.cfg.format_version
        image_tokens = tokens["image_token"] * self.cfg.mp_image_token_length
        if format_version == 3:
            return [image_tokens] * len(grids)
        markups = []
        for i, (rows, columns) in enumerate(grids):
            text = f"<image: {i}>" if len(grids) > 1 else ""
            if format_version == 5:
                text += tokens["global_image_token"] + image_tokens
            if format_version == 4 or rows * columns > 1:
                if f"r{rows}c{columns}" not in tokens:
                    raise InputError(
                        f"an image of {rows} x {columns} tiles, but vlm_extra_tokens has no r{rows}c{columns}; "
                        "lower max_img_size in config.json"
                    )
                names = [tokens[f"r{row}c{column}"] for row in range(1, rows + 1) for column in range(1, columns + 1)]
                text += "".join(name + image_tokens for name in names)
            markups.append(text)
        return markups

    def __call__(self, images: Sequence[Sequence[Image.Image]], questions: Sequence[str]) -> dict[str, Any]:
        """A batch for `generate`: row i asks questions[i] about images[i], any number of them. See `collate`."""
        if len(images) != len(questions):
            raise InputError(f"{len(images)} rows of images, but {len(questions)} prompts; pass one prompt a row")
        return self.collate([self.encode(row, question) for row, question in zip(images, questions)])

    def collate(self, rows: Sequence[EncodedPrompt]) -> dict[str, Any]:
        """Pad encoded prompts on the left to a batch.

        input_ids and attention_mask (B, T) int64; images (N, 3, S, S), the tiles of all rows, or None.
        """
        length = max(len(ids) for ids, _ in rows)
        pad_id = self.tokenizer.eos_token_id  # any id would do: the mask hides it
        tiles = [one for _, images in rows for one in images]
        return {
            "input_ids": torch.tensor([[pad_id] * (length - len(ids)) + ids for ids, _ in rows]),
            "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids, _ in rows]),
            "images": torch.cat(tiles) if tiles else None,
        }

    def encode_questions(self, images: Sequence[Image.Image], questions: Sequence[str]) -> dict[str, Any]:
        """A batch for `generate` with one row per question about the same images, which are encoded once.

        The first `shared` ids are the same in every row and hold all image tokens; padding follows them.
        """
        tiles = [self.preprocess(image) for image in images]
        rows = [self.encode_prompt([grid for _, grid in tiles], question) for question in questions]
        columns = zip(*(ids[:-1] for ids in rows))  # every row keeps one id of its own to prefill
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        batch = self.collate([(ids[shared:], []) for ids in rows])
        for name, prefix in (("input_ids", rows[0][:shared]), ("attention_mask", [1] * shared)):
            shared_columns = torch.tensor(prefix, dtype=torch.long).expand(len(rows), -1)
            batch[name] = torch.cat([shared_columns, batch[name]], dim=1)
        images_tensor = torch.cat([one for one, _ in tiles]) if tiles else None
        return batch | {"images": images_tensor, "shared_prefix_length": shared}

    def _encode_completion(self, n_images: int, question: str, history: Sequence[tuple[str, str]]) -> list[int]:
        """The layout of format versions 1 and 2, which have no chat template."""
        ids = [self.tokenizer.image_token_id] * (self.cfg.mp_image_token_length * n_images)
        for earlier, answer in history:
            ids += self.tokenizer.encode(f"Question: {earlier} Answer:") + self.tokenizer.encode(answer)
            ids.append(self.tokenizer.eos_token_id)
        return ids + self.tokenizer.encode(f"Question: {question} Answer:")

    def _max_side(self, size: tuple[int, int], to_max_side: bool) -> int | None:
        """The longest side, in pixels, that keeps an image within max_tiles; None means one tile."""
        tile, max_side = self.cfg.vit_img_size, self.cfg.max_img_size or 0
        while max_side > tile:  # at one tile the resize rule would round some squares up to two
            width, height = resized_size(*size, tile, max_side, to_max_side)
            if self.max_tiles is None or (width // tile) * (height // tile) <= self.max_tiles:
                return max_side
            max_side -= tile
        return None
