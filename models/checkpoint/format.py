"""Names of settings and tensors in files: nanoVLM's own format, and the base of those in `models.formats`."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from models.checkpoint.folder import CONFIG, TOKENIZER, is_base_vocabulary, missing_token, vocabulary
from models.common.errors import CheckpointError
from models.config import VLMConfig
from models.language_model import inverse_frequencies

TOKENIZER_CONFIG = "tokenizer_config.json"
# Without this in tokenizer_config.json, transformers 4 adds token_type_ids, which no model here takes.
MODEL_INPUT_NAMES = ["input_ids", "attention_mask"]
NO_IMAGE_TOKEN = -1  # nanoVLM v0.1 has no token for images
HEAD = "decoder.head.weight"
EMBEDDING = "decoder.token_embedding.weight"
TIED = (EMBEDDING, HEAD)  # one tensor if lm_tie_weights
INV_FREQ = "decoder.rotary_embd.inv_freq"


class Format:
    """Names of settings and tensors in a model's folder: nanoVLM's own, and the base of the others.

    An instance of a subclass, `cfg.format`, has the settings that VLMConfig has no field for.
    """

    name: ClassVar[str] = "nanovlm"
    other_files: ClassVar[tuple[str, ...]] = ()  # read and written beside config.json, weights and tokenizer.json
    tied: ClassVar[tuple[str, str]] = TIED  # the files' names of token embedding and head, which may be one tensor
    unit_pixels: ClassVar[bool] = True  # pixels are in [0, 1]; in [-1, 1] if False
    crops_to_patches: ClassVar[bool] = False  # pixels beyond the last whole patch of a tile are cut off
    for_transformers: ClassVar[bool] = False  # transformers reads the folder
    words: ClassVar[Mapping[str, str]] = {}  # the key in config.json for some fields of VLMConfig, in errors

    @classmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> VLMConfig:
        """The config of config.json's object and the texts of the other files that are there."""
        return VLMConfig.from_dict(raw)

    def config_dict(self, cfg: VLMConfig) -> dict:
        """The object to write as config.json."""
        return cfg.own_dict()

    def texts(self, cfg: VLMConfig, dtype: torch.dtype, tokenizer: str | None, home: str | None) -> dict[str, str]:
        """Texts of the files to write beside weights in dtype and tokenizer.json; see `write_checkpoint_files`."""
        config = cfg.to_dict()
        objects = {CONFIG: config}
        if tokenizer is not None:
            name = config["lm_tokenizer"]
            on_hub = name != "none" and not Path(name).exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
            if home is not None and not on_hub:
                config["lm_tokenizer"] = home  # where stock nanoVLM finds the tokenizer, by AutoTokenizer
            objects[TOKENIZER_CONFIG] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": MODEL_INPUT_NAMES,
                "eos_token": cfg.end_token,
                "extra_special_tokens": cfg.special_tokens,
                "chat_template": cfg.lm_chat_template,
            }
        return {name: json.dumps(values, indent=2) + "\n" for name, values in objects.items()}

    @staticmethod
    def to_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of VisionLanguageModel under the names of the files; shares memory with it."""
        return dict(state)

    @staticmethod
    def from_stored(stored: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names of ours. Empties the dict, so that joined tensors are not kept twice."""
        return stored

    @classmethod
    def tensors(cls, cfg: VLMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to write, of a tied pair one. Stock nanoVLM, which is strict, wants the frequencies, too."""
        tensors = {**state, INV_FREQ: inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base)}
        if cfg.lm_tie_weights:
            del tensors[EMBEDDING]
        return tensors

    def for_names(self, names: Iterable[str]) -> "Format":
        """The format of a folder whose files have tensors of these names."""
        return self

    @staticmethod
    def patch_positions(grid: int) -> list[int] | None:
        """The position, along a side, of each of its `grid` patches; None if they are 0, 1, 2 ..."""
        return None

    def find_image_token_id(self, folder: Path, cfg: VLMConfig) -> int:
        """The id of the image token in folder's tokenizer.json, or without one by nanoVLM's rule for extra tokens.

        A tokenizer.json of lm_base_vocab_size tokens is a backbone's own and is read as if the extra tokens followed.
        NO_IMAGE_TOKEN if cfg names none. Raises CheckpointError if the tokenizer does not know the token.
        """
        if cfg.vlm_extra_tokens is None:
            return NO_IMAGE_TOKEN
        path = folder / TOKENIZER
        if not path.exists():  # the extra tokens follow the base vocabulary, in their order
            return cfg.base_vocab_size + list(cfg.vlm_extra_tokens).index("image_token")
        ids = vocabulary(path)
        if is_base_vocabulary(ids, cfg):
            missing = [token for token in dict.fromkeys(cfg.special_tokens.values()) if token not in ids]
            ids |= {token: len(ids) + i for i, token in enumerate(missing)}
        image_token_id = ids.get(cfg.vlm_extra_tokens["image_token"])
        if image_token_id is None:
            raise CheckpointError(f"{path}: {missing_token(cfg, 'image_token', len(ids))}")
        return image_token_id

    def check_image_token_id(self, image_token_id: int, folder: Path) -> None:
        """CheckpointError if config.json names another id than image_token_id, that of the tokenizer in folder."""
        return


NANOVLM = Format()
# model_type of config.json -> a function that imports a subclass of Format; "import models.formats" fills it.
FORMATS: dict[str, Callable[[], type[Format]]] = {}


def format_of(cfg: VLMConfig) -> Format:
    """The format of a config; nanoVLM's own for one that names none."""
    return NANOVLM if cfg.format is None else cfg.format
