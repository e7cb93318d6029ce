"""VLMConfig: the sizes of a model and the layout of its prompts, under the names of nanoVLM's config.json."""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args

from models.common.errors import InputError, PromptTooLongError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VERSION_KEYS = ("vlm_extra_tokens", "lm_chat_template", "max_img_size")  # missing until version 2, 3, 4
# Keys of some versions that nothing here uses; kept like unknown keys, but without a warning.
IGNORED_KEYS = {
    "lm_eos_token_id", "IMAGE_TOKEN_LENGTH", "TOTAL_SEQUENCE_LENGTH", "lm_rope_factor", "lm_beta_fast", "lm_beta_slow",
}  # fmt: skip
PREPROCESSING = re.compile("img|image|resize|side_len|crop|tile|pixel|flash", re.IGNORECASE)  # in a key's name
# Of numbers: the lowest value, and the first that is too high; by type, and for some fields by name.
LIMITS: dict[Any, tuple[float, float]] = {
    int: (1, 2**31), float: (0, math.inf), "extra_token_amount": (0, 2**31), "lm_re_base": (1, math.inf),
    "lm_n_blocks": (1, 500), "vit_n_blocks": (1, 500),  # building a million blocks would take an hour
    "lm_attn_scaling": (1e-6, math.inf), "vit_dropout": (0, 1), "lm_dropout": (0, 1),
}  # fmt: skip


def extra_tokens(grid: int) -> dict[str, str]:
    """nanoVLM's extra tokens by name: the image token, the global view, and the positions in a grid x grid of tiles."""
    sides = range(1, grid + 1)
    return {
        "image_token": "<|image|>",
        "global_image_token": "<|global_image|>",
        **{f"r{row}c{column}": f"<row_{row}_col_{column}>" for row in sides for column in sides},
    }


def is_optional(field: Field) -> bool:
    """True for a field that a config.json may lack, depending on its format version."""
    return bool(get_args(field.type)) or "optional" in field.metadata


@dataclass(frozen=True)
class VLMConfig:
    """Sizes of a model and the layout of images and text in its prompts; defaults are nanoVLM-460M-8k's.

    None stands for a key that the model's format version does not have. Raises InputError for values that do not fit.
    """

    vit_hidden_dim: int = 768
    vit_inter_dim: int = 3072
    vit_patch_size: int = 16
    vit_img_size: int = 512  # side of one tile in pixels
    vit_n_heads: int = 12
    vit_dropout: float = 0.0
    vit_n_blocks: int = 12
    vit_ln_eps: float = 1e-6
    vit_cls_flag: bool = False
    vit_model_type: str = "google/siglip2-base-patch16-512"

    lm_hidden_dim: int = 960
    lm_inter_dim: int = 2560
    lm_rms_eps: float = 1e-5
    lm_re_base: float = 100000
    lm_max_position_embeddings: int = 8192
    lm_base_vocab_size: int | None = 49152
    extra_token_amount: int | None = 66
    lm_vocab_size: int = 49218
    lm_n_heads: int = 15
    lm_n_kv_heads: int = 5
    lm_dropout: float = 0.0
    lm_n_blocks: int = 32
    lm_attn_scaling: float = 1.0
    lm_max_length: int = 4096
    lm_use_tokens: bool = False
    lm_tie_weights: bool = True
    lm_model_type: str = "HuggingFaceTB/SmolLM2-360M-Instruct"
    lm_tokenizer: str = "HuggingFaceTB/SmolLM2-360M-Instruct"
    lm_chat_template: str | None = CHATML

    mp_pixel_shuffle_factor: int = 4
    mp_image_token_length: int = field(default=64, metadata={"optional": True})  # computed from the sizes if None

    max_img_size: int | None = 1536
    resize_to_max_side_len: bool | None = False

    vlm_extra_tokens: dict[str, str] | None = field(default_factory=lambda: extra_tokens(8))
    vlm_load_backbone_weights: bool = True
    vlm_checkpoint_path: str = "checkpoints"
    hf_repo_name: str | None = "nanoVLM"

    unknown: dict = field(default_factory=dict)  # other keys of config.json, kept when it is written again
    format: Any = None  # a models.checkpoint.Format of other names than nanoVLM's; no key in files

    def __post_init__(self):
        for f in fields(self):
            if getattr(self, f.name) is not None or not (is_optional(f) or f.name == "format"):
                self._check_field(f)
        if self.vlm_extra_tokens is not None and "image_token" not in self.vlm_extra_tokens:
            raise InputError(f"vlm_extra_tokens={self.vlm_extra_tokens} names no image_token")
        if self.vit_cls_flag:
            raise InputError("vit_cls_flag=true would leave one vector per image; only false is supported")
        self._check_sizes()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "VLMConfig":
        """The config of the object of a nanoVLM config.json, of any version since May 2025.

        Missing keys take the value that all versions agree on. Unknown keys are kept, and one warning names them.
        Raises InputError for a missing size and for an unknown key that may change how images are read.
        """
        known = {f.name: f for f in fields(cls) if f.name not in ("unknown", "format")}
        sizes = [key for key, f in known.items() if f.type is int and not (is_optional(f) or key.startswith("lm_max_"))]
        if missing := [key for key in (*sizes, "lm_tokenizer") if key not in raw]:
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
        return cls(**values, unknown=unknown)

    def to_dict(self) -> dict:
        """The object to write as config.json, without the keys that the model's version does not have."""
        return self.own_dict() if self.format is None else self.format.config_dict(self)

    def own_dict(self) -> dict:
        """The fields under nanoVLM's names, whatever the format."""
        raw = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("unknown", "format")}
        if self.vlm_extra_tokens is None:
            del raw["mp_image_token_length"]
        return {key: value for key, value in raw.items() if value is not None} | self.unknown

    def validate_length(
        self, prompt: int, max_new_tokens: int = 1, what: str = "", remedy: str = "shorten either"
    ) -> int:
        """Return how many tokens may follow a prompt of that length; PromptTooLongError unless max_new_tokens may.

        what names the prompt in the message.
        """
        limit = self.lm_max_position_embeddings
        room = limit - prompt + 1  # the last token generated is not processed
        if max_new_tokens > room:
            what = what or f"a prompt of {prompt} tokens and max_new_tokens={max_new_tokens}"
            raise PromptTooLongError(f"{what} exceed lm_max_position_embeddings={limit}; {remedy}")
        return room

    def _check_field(self, f: Field) -> None:
        """Raise InputError if a field's value has the wrong type or is out of range; an int is a valid float."""
        name = f.name
        value = getattr(self, f.name)
        kind = (get_args(f.type) or (f.type,))[0]
        if kind is float and type(value) is int:
            object.__setattr__(self, name, value := float(value))
        if kind in (int, float, bool, str) and type(value) is not kind:
            raise InputError(f"{name}={value!r} is not of type {kind.__name__}")
        is_table = isinstance(value, dict) and all(isinstance(token, str) for token in value.values())
        if name == "vlm_extra_tokens" and not is_table:
            raise InputError(f"{name}={value!r} is not a table of names and tokens")
        if kind in (int, float):
            low, high = LIMITS.get(name, LIMITS[kind])
            if not low <= value < high:
                raise InputError(f"{name}={value} is outside [{low}, {high})")

    def _check_sizes(self) -> None:
        """Raise InputError unless heads, patches, tiles and pixel shuffle divide the sizes they split."""
        pairs = [("vit_hidden_dim", "vit_n_heads"), ("lm_hidden_dim", "lm_n_heads"), ("lm_n_heads", "lm_n_kv_heads")]
        if self.format is None or not self.format.crops_to_patches:
            pairs.append(("vit_img_size", "vit_patch_size"))
        for whole, part in (*pairs, ("max_img_size", "vit_img_size")):
            if (getattr(self, whole) or 0) % getattr(self, part):
                raise InputError(
                    f"{whole}={getattr(self, whole)} is not a multiple of {part}={getattr(self, part)}; change either"
                )
        if self.lm_head_dim % 2:
            raise InputError(
                f"lm_hidden_dim={self.lm_hidden_dim} over lm_n_heads={self.lm_n_heads} gives heads of "
                f"{self.lm_head_dim}; rotary positions need an even number"
            )
        if self.vit_grid % self.mp_pixel_shuffle_factor:
            raise InputError(
                f"{self.vit_grid} patches a side (vit_img_size={self.vit_img_size} / "
                f"vit_patch_size={self.vit_patch_size}) is not a multiple of "
                f"mp_pixel_shuffle_factor={self.mp_pixel_shuffle_factor}"
            )
        n_embeddings = (self.vit_grid // self.mp_pixel_shuffle_factor) ** 2
        if self.mp_image_token_length is None:
            object.__setattr__(self, "mp_image_token_length", n_embeddings)
        if self.mp_image_token_length != n_embeddings:
            raise InputError(
                f"mp_image_token_length={self.mp_image_token_length}, but an image has {n_embeddings} embeddings"
            )

    @property
    def lm_head_dim(self) -> int:
        return self.lm_hidden_dim // self.lm_n_heads

    @property
    def vit_grid(self) -> int:
        """Number of patches along one side of a tile."""
        return self.vit_img_size // self.vit_patch_size

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the extra tokens by name; empty if there are none, as in nanoVLM's first models."""
        return self.vlm_extra_tokens or {}

    @property
    def base_vocab_size(self) -> int:
        """Size of the language model's vocabulary without extra tokens."""
        return self.lm_vocab_size if self.lm_base_vocab_size is None else self.lm_base_vocab_size

    @property
    def end_token(self) -> str:
        """The token that ends an answer. The files' lm_eos_token_id is wrong from version 2 on, so it is not used."""
        return "<|endoftext|>" if self.vlm_extra_tokens is None else "<|im_end|>"

    @property
    def format_name(self) -> str:
        return "nanovlm" if self.format is None else self.format.name

    @property
    def format_version(self) -> int:
        """nanoVLM's 1: May 2025, 2: from 4 June, 3: 11 June, 4: 12 July, 5: since 9 September 2025; SmolVLM's is 6."""
        if self.format_name == "smolvlm":
            return 6
        has = [getattr(self, key) is not None for key in VERSION_KEYS]
        if not all(has):
            return 1 + has.index(False)
        return 5 if "global_image_token" in self.special_tokens else 4
