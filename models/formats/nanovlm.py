"""nanoVLM's own checkpoints, whose names of settings and tensors are ours, in five versions since May 2025.

The version follows from the keys that config.json lacks; `nanovlm.processing.layouts.nanovlm` says what it changes.
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import CONFIG, EMBEDDING, HEAD, TOKENIZER_CONFIG
from models.config import CheckpointFormat, VLMConfig, is_optional
from models.errors import InputError
from models.formats import MODEL_INPUT_NAMES
from models.language_model import inverse_frequencies

INV_FREQ = "decoder.rotary_embd.inv_freq"
NOWHERE = "none"  # lm_tokenizer of a model whose tokenizer is in its own folder only
# Keys of some versions that nothing here uses; kept like unknown keys, but without a warning.
IGNORED_KEYS = {
    "lm_eos_token_id", "IMAGE_TOKEN_LENGTH", "TOTAL_SEQUENCE_LENGTH", "lm_rope_factor", "lm_beta_fast", "lm_beta_slow",
}  # fmt: skip
PREPROCESSING = re.compile("img|image|resize|side_len|crop|tile|pixel|flash", re.IGNORECASE)  # in a key's name
VERSION_KEYS = ("vlm_extra_tokens", "lm_chat_template", "max_img_size")  # missing until version 2, 3, 4


def end_token(cfg: VLMConfig) -> str:
    """The token that ends an answer. The files' lm_eos_token_id is wrong from version 2 on, so it is not used."""
    return "<|endoftext|>" if cfg.vlm_extra_tokens is None else "<|im_end|>"


@dataclass(frozen=True)
class NanoVLM(CheckpointFormat):
    name = "nanovlm"
    tied = (EMBEDDING, HEAD)

    @classmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> VLMConfig:
        """Missing keys take the value that all versions agree on; a missing size is an InputError.

        Unknown keys are kept, and one warning names them; one that would change the images is an InputError.
        """
        known = {f.name: f for f in fields(VLMConfig) if f.name not in ("unknown", "format")}
        sizes = [
            key for key, f in known.items() if f.type is int and not is_optional(f) and not key.startswith("lm_max_")
        ]
        missing = [key for key in (*sizes, "lm_tokenizer") if key not in raw]
        if missing:
            raise InputError(f"{', '.join(missing)} missing; every nanoVLM config.json has these keys")
        for key in VERSION_KEYS:
            if key in raw and raw[key] is None:
                raise InputError(f"{key}=None means nothing; give it a value, or leave it out as older files do")
        unknown = {key: value for key, value in raw.items() if key not in known}
        names = [key for key in unknown if key not in IGNORED_KEYS]
        for key in names:
            if PREPROCESSING.search(key) and raw[key] not in (None, False):
                raise InputError(f"{key}={raw[key]!r} may change how images are read, and is not supported")
        if names:
            warnings.warn(f"config.json has unknown keys, kept as they are: {', '.join(names)}", stacklevel=2)
        values: dict = {key: None for key, f in known.items() if is_optional(f)}
        values |= {key: value for key, value in raw.items() if key in known}
        return VLMConfig(**values, unknown=unknown, format=cls())

    def config_dict(self, cfg: VLMConfig) -> dict:
        """Without the keys that the model's version does not have."""
        raw = asdict(cfg)
        unknown = raw.pop("unknown")
        del raw["format"]
        if cfg.vlm_extra_tokens is None:
            del raw["mp_image_token_length"]
        return {key: value for key, value in raw.items() if value is not None} | unknown

    def texts(self, cfg: VLMConfig, dtype: torch.dtype, tokenizer: str | None, home: str | None) -> dict[str, str]:
        """config.json and, as stock nanoVLM reads the tokenizer by AutoTokenizer, tokenizer_config.json."""
        config = self.config_dict(cfg)
        if tokenizer is not None and home is not None:
            config["lm_tokenizer"] = _tokenizer_home(config["lm_tokenizer"], home)
        objects = {CONFIG: config}
        if tokenizer is not None:
            objects[TOKENIZER_CONFIG] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": MODEL_INPUT_NAMES,
                "eos_token": end_token(cfg),
                "extra_special_tokens": cfg.special_tokens,
                "chat_template": cfg.lm_chat_template,
            }
        return {name: json.dumps(values, indent=2) + "\n" for name, values in objects.items()}

    def weights(self, cfg: VLMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As stock nanoVLM, which is strict, reads them: with the frequencies, and of a tied pair the head alone."""
        tensors = {**state, INV_FREQ: inverse_frequencies(cfg.lm_head_dim, cfg.lm_re_base)}
        if cfg.lm_tie_weights:
            del tensors[EMBEDDING]
        return tensors

    def version(self, cfg: VLMConfig) -> int:
        """1: May 2025, 2: from 4 June, 3: from 11 June, 4: from 12 July, 5: since 9 September 2025."""
        has = [getattr(cfg, key) is not None for key in VERSION_KEYS]
        if not all(has):
            return 1 + has.index(False)
        return 5 if "global_image_token" in cfg.special_tokens else 4


def _tokenizer_home(name: str, home: str) -> str:
    """The lm_tokenizer by which stock nanoVLM finds the tokenizer: home, unless name is a Hub id already."""
    on_hub = name != NOWHERE and not Path(name).exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    return name if on_hub else home
