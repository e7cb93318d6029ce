"""Pictures and words together: from what a person gives to what the model reads.

This is the one place where a checkpoint's era (`VLMConfig.format_version`) decides how they are laid out:

era 1   the places of the images, for which there is no token; then "Question: ... Answer:"
era 2   the same places as <|image|> tokens; then the same
era 3   a chat, whose first user turn begins with all those places. Up to here a picture is one image, squeezed
era 4   a picture is cut into tiles, whose names stand before their places; several pictures are numbered, <image: 0>
era 5   the whole picture, squeezed into one more tile and named <|global_image|>, comes before its tiles
"""

from collections.abc import Sequence
from itertools import takewhile

import torch
from PIL import Image
from torch import Tensor

from models.config import VLMConfig
from nanovlm.image_processing import preprocess, resized_size
from nanovlm.tokenizer import Tokenizer

Inputs = tuple[list[int], list[Tensor]]  # one prompt's ids, and each of its pictures' images (n, 3, S, S)


class Processor:
    """Lays pictures and a prompt out as the checkpoint was trained to read them.

    max_tiles and upscale are a budget of what a picture may cost: at most so many tiles, beside the global view, and
    not enlarged to the checkpoint's largest side first. The model sees less; where it cuts no tiles, nothing changes.
    """

    def __init__(self, cfg: VLMConfig, tokenizer: Tokenizer, max_tiles: int | None = None, upscale: bool = True):
        if max_tiles is not None and max_tiles < 1:
            raise ValueError(f"max_tiles={max_tiles} is less than 1, as which a picture is squeezed into one tile")
        self.cfg, self.tokenizer, self.max_tiles, self.upscale = cfg, tokenizer, max_tiles, upscale

    def images(self, picture: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Tiles of an RGB picture, (n, 3, S, S) in [0, 1], any global view first; and the grid (rows, columns)."""
        to_max_side = bool(self.cfg.resize_to_max_side_len) and self.upscale
        return preprocess(
            picture,
            tile=self.cfg.vit_img_size,
            max_side=self._max_side(picture.size, to_max_side),
            to_max_side=to_max_side,
            global_view=self.cfg.format_version == 5,
        )

    def _max_side(self, size: tuple[int, int], to_max_side: bool) -> int | None:
        """How long a picture of that size may become within the budget; None squeezes it into one tile."""
        tile, max_side = self.cfg.vit_img_size, self.cfg.max_img_size or 0
        while max_side > tile:  # at one tile the resize rule would round some squares up to two
            width, height = resized_size(*size, tile, max_side, to_max_side)
            if self.max_tiles is None or (width // tile) * (height // tile) <= self.max_tiles:
                return max_side
            max_side -= tile
        return None

    @property
    def most_images(self) -> int:
        """How many images one picture becomes at most."""
        tiles = ((self.cfg.max_img_size or self.cfg.vit_img_size) // self.cfg.vit_img_size) ** 2
        tiles = min(tiles, self.max_tiles or tiles)
        return tiles + (self.cfg.format_version == 5 and tiles > 1)

    def markup(self, grids: Sequence[tuple[int, int]]) -> str:
        """The text that stands for pictures in a chat: their tiles' names, each followed by its image tokens."""
        token, format_version = self.cfg.vlm_extra_tokens, self.cfg.format_version
        places = token["image_token"] * self.cfg.mp_image_token_length
        if format_version == 3:
            return places * len(grids)
        texts = []
        for k, (rows, columns) in enumerate(grids):
            text = f"<image: {k}>" if len(grids) > 1 else ""
            if format_version == 5:
                text += token["global_image_token"] + places
            if format_version == 4 or rows * columns > 1:
                if f"r{rows}c{columns}" not in token:
                    raise ValueError(
                        f"a picture of {rows} x {columns} tiles, but vlm_extra_tokens names no r{rows}c{columns}"
                    )
                for row in range(1, rows + 1):
                    text += "".join(token[f"r{row}c{column}"] + places for column in range(1, columns + 1))
            texts.append(text)
        return "".join(texts)

    def prompt(self, grids: Sequence[tuple[int, int]], text: str, history: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Ids of one question, pictures before all text, up to where the answer begins.

        history holds the questions and answers before it, oldest first.
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt is one question, a string, not a {type(text).__name__}; pass others as history")
        if self.cfg.format_version < 3:
            ids = [self.tokenizer.image_token_id] * (self.cfg.mp_image_token_length * len(grids))
            for asked, answer in history:
                ids += self.tokenizer.encode(f"Question: {asked} Answer:") + self.tokenizer.encode(answer)
                ids.append(self.tokenizer.eos_token_id)
            return ids + self.tokenizer.encode(f"Question: {text} Answer:")
        turns = [words for pair in history for words in pair] + [text]
        chat = [{"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(turns)]
        chat[0]["images"] = self.markup(grids)
        return self.tokenizer.encode_chat(chat)

    def __call__(self, pictures: Sequence[Sequence[Image.Image]], prompts: Sequence[str]) -> dict[str, Tensor | None]:
        """A batch for `generate`: row b shows pictures[b], any number of them, and asks prompts[b].

        input_ids and attention_mask (B, T), padded on the left; images (N, 3, S, S) of all rows, None if none.
        """
        if len(pictures) != len(prompts):
            raise ValueError(f"{len(pictures)} rows of pictures, but {len(prompts)} prompts")
        return self.batch([self.row(shown, text) for shown, text in zip(pictures, prompts)])

    def row(self, pictures: Sequence[Image.Image], text: str) -> Inputs:
        """What one row of a batch reads."""
        tiles = [self.images(picture) for picture in pictures]
        return self.prompt([grid for _, grid in tiles], text), [images for images, _ in tiles]

    def batch(self, rows: Sequence[Inputs]) -> dict[str, Tensor | None]:
        """Rows that `row` made, as one batch."""
        longest = max(len(ids) for ids, _ in rows)
        pad = self.tokenizer.eos_token_id  # any id would do: the mask hides it
        images = [tiles for _, pictures in rows for tiles in pictures]
        return {
            "input_ids": torch.tensor([[pad] * (longest - len(ids)) + ids for ids, _ in rows]),
            "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in rows]),
            "images": torch.cat(images) if images else None,
        }

    def questions(self, pictures: Sequence[Image.Image], texts: Sequence[str]) -> dict[str, Tensor | int | None]:
        """A batch for `generate` about the same pictures, which it looks at once: a row for each of the texts.

        The first `shared` ids of all rows are alike and hold every image; padding stands behind them.
        """
        tiles = [self.images(picture) for picture in pictures]
        rows = [self.prompt([grid for _, grid in tiles], text) for text in texts]
        columns = zip(*(ids[:-1] for ids in rows))  # something must be left to read of each
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        head, batch = rows[0][:shared], self.batch([(ids[shared:], []) for ids in rows])
        for name, same in (("input_ids", head), ("attention_mask", [1] * shared)):
            same = torch.tensor(same, dtype=torch.long).expand(len(rows), -1)
            batch[name] = torch.cat([same, batch[name]], dim=1)
        return batch | {"images": torch.cat([images for images, _ in tiles]) if tiles else None, "shared": shared}
