"""Pictures and words together: from what a person gives to what the model reads."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from models.config import VLMConfig
from nanovlm.images import pixels
from nanovlm.tokenizer import Tokenizer


class Processor:
    """Lays pictures and a prompt out as nanoVLM's checkpoints since September 2025 were trained to read them."""

    def __init__(self, cfg: VLMConfig, tokenizer: Tokenizer):
        self.cfg, self.tokenizer = cfg, tokenizer

    def images(self, picture: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Tiles of an RGB picture, (n, 3, S, S) in [0, 1], the global view first; and the grid (rows, columns)."""
        one_tile = self.cfg.max_img_size == self.cfg.vit_img_size  # the resize rule would round some squares up to two
        return pixels(
            picture,
            tile=self.cfg.vit_img_size,
            max_side=None if one_tile else self.cfg.max_img_size,
            to_max_side=self.cfg.resize_to_max_side_len,
            global_view=True,
        )

    def markup(self, grids: Sequence[tuple[int, int]]) -> str:
        """The text that stands for pictures: their tiles' names, each followed by its image tokens."""
        token = self.cfg.vlm_extra_tokens
        places = token["image_token"] * self.cfg.mp_image_token_length
        texts = []
        for k, (rows, columns) in enumerate(grids):
            text = f"<image: {k}>" if len(grids) > 1 else ""
            text += token["global_image_token"] + places
            if rows * columns > 1:
                if f"r{rows}c{columns}" not in token:
                    raise ValueError(
                        f"a picture of {rows} x {columns} tiles, but vlm_extra_tokens names no r{rows}c{columns}"
                    )
                for row in range(1, rows + 1):
                    text += "".join(token[f"r{row}c{column}"] + places for column in range(1, columns + 1))
            texts.append(text)
        return "".join(texts)

    def prompt(self, grids: Sequence[tuple[int, int]], text: str) -> list[int]:
        """Ids of one user turn, pictures before the text, up to where the answer begins."""
        return self.tokenizer.encode_chat([{"role": "user", "images": self.markup(grids), "content": text}])

    def __call__(self, pictures: Sequence[Sequence[Image.Image]], prompts: Sequence[str]) -> dict[str, Tensor | None]:
        """A batch for `generate`: row b shows pictures[b], any number of them, and asks prompts[b].

        input_ids and attention_mask (B, T), padded on the left; images (N, 3, S, S) of all rows, None if none.
        """
        if len(pictures) != len(prompts):
            raise ValueError(f"{len(pictures)} rows of pictures, but {len(prompts)} prompts")
        rows, images = [], []
        for row, text in zip(pictures, prompts):
            tiles = [self.images(picture) for picture in row]
            images += [tile for tile, _ in tiles]
            rows.append(self.prompt([grid for _, grid in tiles], text))
        longest = max(map(len, rows))
        pad = self.tokenizer.eos_token_id  # any id would do: the mask hides it
        return {
            "input_ids": torch.tensor([[pad] * (longest - len(ids)) + ids for ids in rows]),
            "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows]),
            "images": torch.cat(images) if images else None,
        }
