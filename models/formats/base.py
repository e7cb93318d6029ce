"""Format: how the files of a model's folder name settings and tensors. The class itself is nanoVLM's own format.

The core reads and writes nanoVLM's names by itself: `cfg.format` is None. Another format is a subclass in a file of its
own, registered in `models.formats`. Its instance, `cfg.format`, has the settings that VLMConfig has no field for.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from models.checkpoint import TIED, own_image_token_id, own_tensors, own_texts, read_state_dict, tensor_names
from models.config import VLMConfig


class Format:
    """nanoVLM's own format, and the base of the others."""

    name: ClassVar[str] = "nanovlm"
    other_files: ClassVar[tuple[str, ...]] = ()  # read and written beside config.json, weights and tokenizer.json
    tied: ClassVar[tuple[str, str]] = TIED  # the files' names of token embedding and head, which may be one tensor
    unit_pixels: ClassVar[bool] = True  # pixels are in [0, 1]; in [-1, 1] if False
    crops_to_patches: ClassVar[bool] = False  # a rest of a tile's side that is no whole patch is left out
    for_transformers: ClassVar[bool] = False  # transformers reads the folder
    words: ClassVar[Mapping[str, str]] = {}  # the key in config.json for some fields of VLMConfig, in errors

    @classmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> VLMConfig:
        """The config of the object of config.json and the texts of the other files that are there.

        Raises InputError or CheckpointError for a value that our modules do not support.
        """
        return VLMConfig.from_dict(raw)

    def config_dict(self, cfg: VLMConfig) -> dict:
        """The object to write as config.json."""
        return cfg.own_dict()

    def texts(self, cfg: VLMConfig, dtype: torch.dtype, tokenizer: str | None, home: str | None) -> dict[str, str]:
        """Texts of the files to write beside weights in dtype and a tokenizer; see `write_settings`."""
        return own_texts(cfg, tokenizer, home)

    @staticmethod
    def to_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of VisionLanguageModel under the names of the files; shares memory with it."""
        return dict(state)

    @staticmethod
    def from_stored(stored: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names of ours. Empties the dict, so that joined tensors are not kept twice."""
        return stored

    def for_names(self, names: Iterable[str]) -> "Format":
        """The format of a folder whose files have tensors of these names."""
        return self

    def read_weights(self, folder: Path, cfg: VLMConfig, empty: Mapping[str, Tensor], **options) -> dict[str, Tensor]:
        """See `models.checkpoint.read_weights`."""
        format = self.for_names(tensor_names(folder))
        shapes = {name: tuple(tensor.shape) for name, tensor in format.to_stored(empty).items()}
        tied = format.tied if cfg.lm_tie_weights else None
        return format.from_stored(read_state_dict(folder, shapes, tied=tied, **options), empty)

    def tensors(self, cfg: VLMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of model.safetensors, by the files' names; of a tied pair only one, as `to_stored` gives both."""
        return own_tensors(cfg, state)

    @staticmethod
    def patch_positions(grid: int) -> list[int] | None:
        """The position, along a side, of each of its `grid` patches; None if they are 0, 1, 2 ..."""
        return None

    def find_image_token_id(self, folder: Path, cfg: VLMConfig) -> int:
        """The id of the image token in folder's tokenizer.json, -1 without one. CheckpointError if it is not there."""
        found = own_image_token_id(folder, cfg)
        self.check_image_token_id(found, folder)
        return found

    def check_image_token_id(self, image_token_id: int, folder: Path) -> None:
        """CheckpointError if config.json names another id than image_token_id, that of the tokenizer in folder."""
        return


NANOVLM = Format()


def format_of(cfg: VLMConfig) -> Format:
    """The format of a config; nanoVLM's own for one that names none."""
    return NANOVLM if cfg.format is None else cfg.format
