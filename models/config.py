"""Settings: VLMConfig, a checkpoint's sizes and prompt layout under nanoVLM's names, and SamplingParams."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, get_args

from models.errors import InputError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Keys of some format versions that nothing here uses; kept like unknown keys, but without a warning.
IGNORED_KEYS = {
    "lm_eos_token_id", "IMAGE_TOKEN_LENGTH", "TOTAL_SEQUENCE_LENGTH", "lm_rope_factor", "lm_beta_fast", "lm_beta_slow",
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
    """Whether a config.json may lack the field, depending on its format version."""
    return bool(get_args(field.type)) or "optional" in field.metadata


@dataclass(frozen=True)
class SmolVLMSettings:
    """Settings of a SmolVLM or Idefics3 folder beyond the fields of VLMConfig; see `models.formats.smolvlm`."""

    files: dict[str, str]  # texts of its JSON and template files by name, which are written again with the model
    longest_edge: int | None  # pixels; an image is first resized so that its longer side has as many. None: it is not
    split: bool  # images into tiles
    resample: int  # one of Pillow's Resampling
    rescale_factor: float  # times a pixel's 0 .. 255
    mean: tuple[float, ...]  # of the three channels, after rescaling
    std: tuple[float, ...]
    fake_image_token: str  # around images; may be empty
    global_image_token: str
    end_token_ids: tuple[int, ...]  # from generation_config.json


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
    smolvlm: SmolVLMSettings | None = None  # of a model in transformers' layout; not a key of nanoVLM's config.json

    def __post_init__(self):
        for f in fields(self):
            if getattr(self, f.name) is not None or not is_optional(f):
                self._check_field(f)
        if self.vlm_extra_tokens is not None and "image_token" not in self.vlm_extra_tokens:
            raise InputError(f"vlm_extra_tokens={self.vlm_extra_tokens} names no image_token")
        if self.vit_cls_flag:
            raise InputError("vit_cls_flag=true would leave one vector per image; only false is supported")
        self._check_divisibility()
        self._set_image_token_length()

    def _check_field(self, f: Field) -> None:
        """Raise InputError if a field's value has the wrong type or is out of range; an int is a valid float."""
        name, value, kind = f.name, getattr(self, f.name), (get_args(f.type) or (f.type,))[0]
        if kind is float and type(value) is int:
            value = float(value)
            object.__setattr__(self, name, value)
        if kind in (int, float, bool, str) and type(value) is not kind:
            raise InputError(f"{name}={value!r} is not of type {kind.__name__}")
        if name == "vlm_extra_tokens" and not (
            isinstance(value, dict) and all(isinstance(token, str) for token in value.values())
        ):
            raise InputError(f"{name}={value!r} is not a table of names and tokens")
        if kind is int and not 0 < value < 2**31 and name != "extra_token_amount":
            raise InputError(f"{name}={value} is not a positive number below 2^31")
        if kind is float and not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name}={value} is not a finite number of at least 0")
        if name in ("lm_re_base", "lm_attn_scaling") and value == 0:
            raise InputError(f"{name}=0 would make all positions or all tokens alike; it must be above 0")
        if name in ("vit_dropout", "lm_dropout") and value >= 1:
            raise InputError(f"{name}={value} is outside [0, 1)")

    def _check_divisibility(self) -> None:
        """Raise InputError unless heads, patches, tiles and pixel shuffle divide the sizes they split."""
        for whole, part in (
            ("vit_hidden_dim", "vit_n_heads"),
            ("vit_img_size", "vit_patch_size"),
            ("lm_hidden_dim", "lm_n_heads"),
            ("lm_n_heads", "lm_n_kv_heads"),
            ("max_img_size", "vit_img_size"),
        ):
            if whole == "vit_img_size" and self.smolvlm is not None:
                continue  # SigLIP-so400m/14 at 384 pixels leaves out the last 6 of each side
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

    def _set_image_token_length(self) -> None:
        """Compute mp_image_token_length if it is not given; InputError if it does not fit the sizes."""
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
        """Texts of the extra tokens by name; empty in format 1, which has none."""
        return self.vlm_extra_tokens or {}

    @property
    def end_token(self) -> str:
        """The token that ends an answer in nanoVLM's formats; in SmolVLM's the chat template has it.

        The files' lm_eos_token_id is wrong from format 2 on, so it is not used.
        """
        return "<|endoftext|>" if self.format_version == 1 else "<|im_end|>"

    @property
    def format_version(self) -> int:
        """Which layout of images and text this is: one of nanoVLM's five, derived from the keys that are present, or 6.

        1: May 2025, 2: from 4 June, 3: from 11 June, 4: from 12 July, 5: since 9 September 2025; 6: transformers'
        SmolVLM.
        """
        if self.smolvlm is not None:
            return 6
        if self.vlm_extra_tokens is None:
            return 1
        if self.lm_chat_template is None:
            return 2
        if self.max_img_size is None:
            return 3
        return 5 if "global_image_token" in self.vlm_extra_tokens else 4

    @classmethod
    def from_dict(cls, raw: dict) -> "VLMConfig":
        """Read the object of a config.json of any format version, which is derived from the missing keys.

        Missing keys take the value that all versions agree on; a missing size is an InputError. Unknown keys are kept,
        and one warning names them.
        """
        known = {f.name: f for f in fields(cls) if f.name not in ("unknown", "smolvlm")}
        sizes = [
            key for key, f in known.items() if f.type is int and not is_optional(f) and not key.startswith("lm_max_")
        ]
        missing = [key for key in (*sizes, "lm_tokenizer") if key not in raw]
        if missing:
            raise InputError(f"{', '.join(missing)} missing; every nanoVLM config.json has these keys")
        for key in ("vlm_extra_tokens", "lm_chat_template", "max_img_size"):  # `format_version` is derived from these
            if key in raw and raw[key] is None:
                raise InputError(f"{key}=None means nothing; give it a value, or leave it out as older files do")
        unknown = {key: value for key, value in raw.items() if key not in known}
        names = [key for key in unknown if key not in IGNORED_KEYS]
        if names:
            warnings.warn(f"config.json has unknown keys, kept as they are: {', '.join(names)}", stacklevel=2)
        values: dict = {key: None for key, f in known.items() if is_optional(f)}
        return cls(**values | {key: value for key, value in raw.items() if key in known}, unknown=unknown)

    def to_dict(self) -> dict:
        """The object to write as config.json, without the keys that the model's format version does not have."""
        if self.smolvlm is not None:
            return json.loads(self.smolvlm.files["config.json"])
        raw = asdict(self)
        unknown = raw.pop("unknown")
        del raw["smolvlm"]
        if self.format_version == 1:
            del raw["mp_image_token_length"]
        return {key: value for key, value in raw.items() if value is not None} | unknown


MAX_NEW_TOKENS = 128  # of a caption


def setting(default: Any, help: str, limits: str = "", fits: Callable[[Any], bool] | None = None, **flag: Any) -> Any:
    """A field of an options record: its default, help, and check fits(value), whose limits an error names.

    flag holds what a command-line flag made from the field needs beside them, such as its metavar; a value other than
    the default must be one of its choices.
    """
    return field(default=default, metadata={"help": help, "limits": limits, "fits": fits, **flag})


def check_settings(record: Any) -> None:
    """Raise InputError for the first field of a record whose value is not within its limits."""
    for f in fields(record):
        value, fits, choices = getattr(record, f.name), f.metadata.get("fits"), f.metadata.get("choices")
        if choices and value is not f.default and value not in choices:
            raise InputError(f"{f.name}={value} is none of {', '.join(choices)}")
        if fits is not None and not fits(value):
            raise InputError(f"{f.name}={value} must be {f.metadata['limits']}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is chosen from logits. The default is greedy; the filters apply in the order of the fields.

    The repetition penalty is that of Keskar et al. 2019, the next two are OpenAI's, top_p is that of Holtzman et al.
    2019 and min_p that of Nguyen et al. 2024. Raises InputError for a value out of range.
    """

    repetition_penalty: float = setting(
        1.0,
        "above 1, tokens of the prompt and the answer become less likely",
        "above 0",
        lambda x: 0 < x < math.inf,
        metavar="X",
    )
    frequency_penalty: float = setting(
        0.0,
        "subtracted from a token's logit for each time it is in the answer; below 0 favors it",
        "in [-2, 2]",
        lambda x: -2 <= x <= 2,
        metavar="X",
    )
    presence_penalty: float = setting(
        0.0,
        "subtracted once from the logits of tokens in the answer; below 0 favors them",
        "in [-2, 2]",
        lambda x: -2 <= x <= 2,
        metavar="X",
    )
    temperature: float = setting(
        0.0, "sampling temperature; 0 is greedy", "0 (greedy) or more", lambda x: 0 <= x < math.inf, metavar="X"
    )
    top_k: int = setting(
        0, "sample among the K most likely tokens; 0 is all", "0 (all) or more", lambda x: x >= 0, metavar="K"
    )
    top_p: float = setting(
        1.0,
        "sample among the most likely tokens whose probabilities sum to P",
        "in (0, 1]",
        lambda x: 0 < x <= 1,
        metavar="P",
    )
    min_p: float = setting(
        0.0,
        "drop tokens less likely than P times the most likely one",
        "in [0, 1]",
        lambda x: 0 <= x <= 1,
        metavar="P",
    )
    seed: int | None = setting(
        None,
        "seed of the random generator, for reproducible samples",
        "in [0, 2^63)",
        lambda x: x is None or 0 <= x < 2**63,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, with no regard to other tokens."""
        return self.temperature == 0 and not self.counts_output

    @property
    def counts_output(self) -> bool:
        """Whether a penalty depends on the tokens generated so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


GREEDY = SamplingParams()
