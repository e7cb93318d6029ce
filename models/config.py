"""Settings: VLMConfig, a checkpoint's sizes and prompt layout under nanoVLM's names, and SamplingParams."""

import importlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, get_args

from models.errors import InputError

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


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


class CheckpointFormat(ABC):
    """How the files of a model's folder hold its config and tensors; `load_config` chooses one for a `VLMConfig`.

    `models.formats` lists the formats, one file for each. An instance has the settings that VLMConfig has no field for.
    """

    name: ClassVar[str]
    other_files: ClassVar[tuple[str, ...]] = ()  # read and written beside config.json, weights and tokenizer.json
    tied: ClassVar[tuple[str, str]]  # their names of token embedding and head, which may be one tensor
    unit_pixels: ClassVar[bool] = True  # pixels are in [0, 1]; in [-1, 1] if False
    crops_to_patches: ClassVar[bool] = False  # a rest of a tile's side that is no whole patch is left out
    for_transformers: ClassVar[bool] = False  # transformers reads the folder
    words: ClassVar[Mapping[str, str]] = {}  # their key in config.json for some fields of VLMConfig, in errors

    @classmethod
    @abstractmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> "VLMConfig":
        """The config from the object of config.json and the texts of the other files that are there.

        Raises InputError or CheckpointError for a value that our modules do not support.
        """

    @abstractmethod
    def config_dict(self, cfg: "VLMConfig") -> dict:
        """The object to write as config.json."""

    @abstractmethod
    def texts(self, cfg: "VLMConfig", dtype: Any, tokenizer: str | None, home: str | None) -> dict[str, str]:
        """Texts of the files to write beside weights in dtype and a tokenizer; see `write_checkpoint_files`."""

    @staticmethod
    def to_stored(state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of VisionLanguageModel under the names of the files; shares memory with it."""
        return dict(state)

    @staticmethod
    def from_stored(stored: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The tensors of these names of ours. Empties the dict, so that joined tensors are not kept twice."""
        return stored

    def for_names(self, names: Iterable[str]) -> "CheckpointFormat":
        """The format of a folder whose files have tensors of these names."""
        return self

    @abstractmethod
    def weights(self, cfg: "VLMConfig", state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of model.safetensors, by the files' names; of a tied pair only one, as `to_stored` gives both."""

    @staticmethod
    def patch_positions(grid: int) -> list[int] | None:
        """The position, along a side, of each of its `grid` patches; None if they are 0, 1, 2 ..."""
        return None

    def find_image_token_id(self, folder: Path, cfg: "VLMConfig") -> int:
        """The id of the image token in folder's tokenizer.json, -1 without one. CheckpointError if it is not there."""
        found = formats().find_image_token_id(folder, cfg)
        self.check_image_token_id(found, folder)
        return found

    def check_image_token_id(self, image_token_id: int, folder: Path) -> None:
        """CheckpointError if config.json names another id than image_token_id, that of the tokenizer in folder."""
        return

    @abstractmethod
    def version(self, cfg: "VLMConfig") -> int:
        """The number of the format in reports."""


def formats() -> Any:
    """`models.formats`. This is the one add-on that the core looks up, and late: its formats import this module."""
    return importlib.import_module("models.formats")


# Of numbers: the lowest value, and the first that is too high; by type, and for some fields by name.
LIMITS: dict[Any, tuple[float, float]] = {
    int: (1, 2**31), float: (0, math.inf), "extra_token_amount": (0, 2**31), "lm_re_base": (1, math.inf),
    "lm_n_blocks": (1, 500), "vit_n_blocks": (1, 500),  # building a million blocks would take an hour
    "lm_attn_scaling": (1e-6, math.inf), "vit_dropout": (0, 1), "lm_dropout": (0, 1),
}  # fmt: skip


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
    format: CheckpointFormat = field(default_factory=lambda: formats().format_class("nanovlm")())  # no key in files

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
            object.__setattr__(self, name, value := float(value))
        if kind in (int, float, bool, str) and type(value) is not kind:
            raise InputError(f"{name}={value!r} is not of type {kind.__name__}")
        if name == "vlm_extra_tokens" and not (
            isinstance(value, dict) and all(isinstance(token, str) for token in value.values())
        ):
            raise InputError(f"{name}={value!r} is not a table of names and tokens")
        if kind in (int, float):
            low, high = LIMITS.get(name, LIMITS[kind])
            if not low <= value < high:
                raise InputError(f"{name}={value} is outside [{low}, {high})")

    def _check_divisibility(self) -> None:
        """Raise InputError unless heads, patches, tiles and pixel shuffle divide the sizes they split."""
        pairs = [("vit_hidden_dim", "vit_n_heads"), ("lm_hidden_dim", "lm_n_heads"), ("lm_n_heads", "lm_n_kv_heads")]
        pairs += [] if self.format.crops_to_patches else [("vit_img_size", "vit_patch_size")]
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
        """Texts of the extra tokens by name; empty if there are none, as in nanoVLM's first models."""
        return self.vlm_extra_tokens or {}

    @property
    def format_version(self) -> int:
        """The number of the format in reports: 1 to 5 are nanoVLM's, 6 is SmolVLM's."""
        return self.format.version(self)

    def to_dict(self) -> dict:
        """The object to write as config.json."""
        return self.format.config_dict(self)


MAX_NEW_TOKENS = 128  # of a caption
RepetitionDetection = tuple[int, int, int]  # shortest and longest cycle in tokens, and how often it is repeated

BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"), "above": (operator.gt, "above"),
    "maximum": (operator.le, "at most"), "below": (operator.lt, "below"),
}  # fmt: skip


def setting(default: Any, help: str, limits: str = "", fits: Callable[[Any], bool] | None = None, **flag: Any) -> Any:
    """A field of an options record: default, help, "" for none, and the check fits(value), whose limits an error names.

    flag holds the bounds of a number, of BOUNDS, and what else its command-line flag needs; a value other than the
    default must be one of its choices.
    """
    return field(default=default, metadata={"help": help, "limits": limits, "fits": fits, **flag})


def check_settings(record: Any) -> None:
    """Raise InputError for the first field of a record whose value is of another type, or not within its limits."""
    for f in fields(record):
        value, fits, choices = getattr(record, f.name), f.metadata.get("fits"), f.metadata.get("choices")
        types = get_args(f.type) or (f.type,)
        if value is None and (f.default is None or type(None) in types):
            continue
        if bool in types and value not in (True, False):
            raise InputError(f"{f.name}={value!r} must be True or False")
        if choices and value is not f.default and value not in choices:
            raise InputError(f"{f.name}={value} is none of {', '.join(choices)}")
        if fits is not None:
            with suppress(TypeError):  # the value is of a type that fits cannot take
                if fits(value):
                    continue
            raise InputError(f"{f.name}={value} must be {f.metadata['limits']}")
        bounds = [(*BOUNDS[name], f.metadata[name]) for name in BOUNDS if name in f.metadata]
        kind = Real if float in types else Integral
        if bounds and not isinstance(value, kind):
            raise InputError(f"{f.name}={value} must be a {'' if kind is Real else 'whole '}number")
        if not all(is_within(value, bound) for is_within, _, bound in bounds):
            limits = " and ".join(f"{words} {bound}" for _, words, bound in bounds)
            raise InputError(f"{f.name}={value} must be {limits}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is chosen from logits. The default is greedy; the filters apply in the order of the fields.

    The repetition penalty is that of Keskar et al. 2019, the next two are OpenAI's, top_p is that of Holtzman et al.
    2019, min_p that of Nguyen et al. 2024, repetition_detection vLLM's. InputError for a value out of range.
    """

    repetition_penalty: float = setting(
        1.0, "above 1, tokens of the prompt and the answer become less likely", above=0, below=math.inf
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's logit each time it is in the answer; below 0 favors it", minimum=-2, maximum=2
    )
    presence_penalty: float = setting(
        0.0, "subtracted once from the logits of tokens in the answer; below 0 favors them", minimum=-2, maximum=2
    )
    temperature: float = setting(0.0, "sampling temperature; 0 is greedy", minimum=0, below=math.inf)
    top_k: int = setting(0, "sample among the K most likely tokens; 0 is all", minimum=0, metavar="K")
    top_p: float = setting(
        1.0, "sample among the most likely tokens whose probabilities sum to P", above=0, maximum=1, metavar="P"
    )
    min_p: float = setting(0.0, "drop tokens less likely than P times the likeliest", minimum=0, maximum=1, metavar="P")
    seed: int | None = setting(None, "seed of the random generator, for reproducible samples", minimum=0, below=2**63)
    repetition_detection: RepetitionDetection = setting(  # noqa: RUF009 (a setting is a field)
        (0, 0, 0), "end an answer that repeats a cycle of MIN to MAX tokens COUNT times; a COUNT of 0 is off",
        "three numbers: MIN to MAX tokens, from 1 on, and a COUNT of 0 (off), or 2 or more",
        lambda x: len(x) == 3 and all(isinstance(n, Integral) for n in x)
        and (x[2] == 0 or (1 <= x[0] <= x[1] and x[2] > 1)),
        nargs=3, metavar=("MIN", "MAX", "COUNT"),
    )  # fmt: skip

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
