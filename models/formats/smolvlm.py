"""Checkpoints of transformers' SmolVLM and Idefics3 (Laurençon et al. 2024, Marafioti et al. 2025): files and names.

The network is nanoVLM's. What differs is around it: names of settings and tensors, normalized pixels, the layout of
images in a prompt, and the positions of patches, which are rounded fractions of a side.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from models.checkpoint import CONFIG, TOKENIZER, TOKENIZER_CONFIG, Format, parse_object
from models.common.errors import CheckpointError
from models.config import VLMConfig
from models.formats.base import LLAMA_CONFIG, SIGLIP_CONFIG, SIGLIP_ONLY, llama_settings, settings

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
LEGACY_TEMPLATE = "chat_template.json"
MAX_EDGE = 2**20  # pixels; characters of a special token
MAX_TOKEN = 1000
IMAGE_TOKEN_ID = 128257  # in a config.json that names none
EMBEDDING = "model.text_model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Defaults of transformers' classes, in files that lack a key.
VISION_DEFAULTS = {"hidden_size": 1152, "num_attention_heads": 16, "image_size": 224, "patch_size": 32}


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_finite, value))


def _has_longest_edge(value: Any) -> bool:
    return isinstance(value, dict) and type(edge := value.get("longest_edge")) is int and 0 < edge <= MAX_EDGE


_SWITCH = (True, lambda value: type(value) is bool, "true or false")
# Of the image processor: the default of transformers' class, the check, and what passes it.
IMAGE_SETTINGS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "do_resize": _SWITCH,
    "size": ({"longest_edge": 4 * 364}, _has_longest_edge, f"a longest_edge of at most {MAX_EDGE} pixels"),
    "resample": (1, lambda value: type(value) is int and 0 <= value <= 5, "one of Pillow's filters, 0 to 5"),  # Lanczos
    "do_image_splitting": _SWITCH,
    "max_image_size": ({"longest_edge": 364}, _has_longest_edge, "a longest_edge in pixels"),
    "do_rescale": _SWITCH,
    "rescale_factor": (1 / 255, _is_finite, "a finite number"),
    "do_normalize": _SWITCH,
    "image_mean": ([0.5, 0.5, 0.5], _is_triple, "a list of three numbers"),
    "image_std": ([0.5, 0.5, 0.5], lambda value: _is_triple(value) and 0 not in value, "three numbers other than 0"),
}
FOLLOWED = {*IMAGE_SETTINGS, "do_pad", "do_convert_rgb"}  # of the keys do_...
TOKENS = {  # attribute of the tokenizer -> token; Idefics3's processor knows no others
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}

VISION_TYPES = (None, "idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")  # None: as the enclosing config's

# Our tensor name -> theirs. The rows of our qkv_proj become their q, k and v.
NAMES = {
    r"vision_encoder\.patch_embedding\.conv\.(\w+)": r"model.vision_model.embeddings.patch_embedding.\1",
    r"vision_encoder\.patch_embedding\.position_embedding": r"model.vision_model.embeddings.position_embedding.weight",
    r"vision_encoder\.blocks\.(\d+)\.ln([12])\.(\w+)": r"model.vision_model.encoder.layers.\1.layer_norm\2.\3",
    r"vision_encoder\.blocks\.(\d+)\.attn\.(\w+)\.(\w+)": r"model.vision_model.encoder.layers.\1.self_attn.\2.\3",
    r"vision_encoder\.blocks\.(\d+)\.mlp\.(\w+)\.(\w+)": r"model.vision_model.encoder.layers.\1.mlp.\2.\3",
    r"vision_encoder\.layer_norm\.(\w+)": r"model.vision_model.post_layernorm.\1",
    r"MP\.proj\.weight": r"model.connector.modality_projection.proj.weight",
    r"decoder\.token_embedding\.weight": EMBEDDING,
    r"decoder\.blocks\.(\d+)\.attn\.out_proj\.weight": r"model.text_model.layers.\1.self_attn.o_proj.weight",
    r"decoder\.blocks\.(\d+)\.attn\.(\w+)\.weight": r"model.text_model.layers.\1.self_attn.\2.weight",
    r"decoder\.blocks\.(\d+)\.mlp\.(\w+)\.weight": r"model.text_model.layers.\1.mlp.\2.weight",
    r"decoder\.blocks\.(\d+)\.norm1\.weight": r"model.text_model.layers.\1.input_layernorm.weight",
    r"decoder\.blocks\.(\d+)\.norm2\.weight": r"model.text_model.layers.\1.post_attention_layernorm.weight",
    r"decoder\.norm\.weight": r"model.text_model.norm.weight",
    r"decoder\.head\.weight": HEAD,
}


@dataclass(frozen=True)
class SmolVLM(Format):
    """Settings of a SmolVLM or Idefics3 folder beyond the fields of VLMConfig."""

    name = "smolvlm"
    other_files = (
        PREPROCESSOR, PROCESSOR, GENERATION, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json",
        TEMPLATE, LEGACY_TEMPLATE,
    )  # fmt: skip
    tied = (EMBEDDING, HEAD)
    unit_pixels = False
    crops_to_patches = True  # SigLIP-so400m/14 at 384 pixels leaves out the last 6 of each side
    for_transformers = True
    words: ClassVar = {
        "mp_pixel_shuffle_factor": "scale_factor", "lm_re_base": "rope_theta", "lm_n_kv_heads": "num_key_value_heads",
        "lm_tie_weights": "tie_word_embeddings",
        **{ours: theirs for ours, (theirs, _) in {**SIGLIP_CONFIG, **LLAMA_CONFIG}.items()},
    }  # fmt: skip

    config: dict  # the object of config.json, without the dtype of the weights
    files: dict[str, str]  # texts of the other files by name, which are written again with the model
    longest_edge: int | None  # pixels; an image is first resized so that its longer side has as many. None: it is not
    split: bool  # images into tiles
    resample: int  # one of Pillow's Resampling
    rescale_factor: float  # times a pixel's 0 .. 255
    mean: tuple[float, ...]  # of the three channels, after rescaling
    std: tuple[float, ...]
    fake_image_token: str  # around images; may be empty
    global_image_token: str
    end_token_ids: tuple[int, ...]  # from generation_config.json or, without that file, config.json

    @classmethod
    def read_config(cls, raw: dict, files: Mapping[str, str]) -> VLMConfig:
        vision = raw.get("vision_config", {})
        text = raw.get("text_config", {})
        fields = settings("vision_config", vision, SIGLIP_ONLY, SIGLIP_CONFIG, VISION_DEFAULTS)
        if vision.get("model_type") not in VISION_TYPES:
            raise CheckpointError(f"vision_config: model_type={vision['model_type']!r} is none of {VISION_TYPES[1:]}")
        fields |= llama_settings("text_config", text)
        fields["lm_vocab_size"] = fields["lm_base_vocab_size"]
        fields["lm_tie_weights"] = raw.get("tie_word_embeddings", False)
        tokens = _tokens(files, raw)
        ends = (_parse(files, GENERATION) if GENERATION in files else raw).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(id) is int and 0 <= id < 2**31 for id in ends):
            raise CheckpointError(f"eos_token_id={ends} are not ids of tokens")
        image = _image_settings(files, fields["vit_img_size"])
        normalizes = image["do_normalize"]
        format = cls(
            config=_without_dtype(raw),
            files=dict(files),
            longest_edge=image["size"] if image["do_resize"] else None,
            split=image["do_image_splitting"],
            resample=image["resample"],
            rescale_factor=float(image["rescale_factor"]) if image["do_rescale"] else 1.0,
            mean=tuple(image["image_mean"]) if normalizes else (0.0, 0.0, 0.0),
            std=tuple(image["image_std"]) if normalizes else (1.0, 1.0, 1.0),
            fake_image_token=tokens["fake_image_token"],
            global_image_token=tokens["global_image_token"],
            end_token_ids=tuple(ends),
        )
        cfg = VLMConfig(
            **fields,
            format=format,
            extra_token_amount=0,
            vlm_extra_tokens={"image_token": tokens["image_token"]},
            lm_chat_template=_chat_template(files),
            lm_max_length=fields["lm_max_position_embeddings"],
            lm_tokenizer="",
            vit_model_type=str(vision.get("_name_or_path", "")),
            lm_model_type=str(text.get("_name_or_path", "")),
            mp_pixel_shuffle_factor=raw.get("scale_factor", 2),
            mp_image_token_length=cast(int, None),  # computed
            max_img_size=None,
            resize_to_max_side_len=None,
            hf_repo_name=None,
        )
        n_image_tokens = _parse(files, PROCESSOR).get("image_seq_len", cfg.mp_image_token_length)
        if n_image_tokens != cfg.mp_image_token_length:
            raise CheckpointError(
                f"{PROCESSOR}: image_seq_len={n_image_tokens}, but a tile has {cfg.mp_image_token_length} embeddings"
            )
        return cfg

    def config_dict(self, cfg: VLMConfig) -> dict:
        return {**self.config}

    def texts(self, cfg: VLMConfig, dtype: torch.dtype, tokenizer: str | None, home: str | None) -> dict[str, str]:
        """The files that the model was read with; config.json has the dtype that transformers loads the weights in."""
        config = self.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
        return self.files | {CONFIG: json.dumps(config, indent=2) + "\n"}

    @staticmethod
    def to_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name.endswith("position_embedding") and tensor.dim() == 3:
                tensor = tensor[0]
            names = _stored_names(name)
            stored |= zip(names, tensor.chunk(len(names)))
        return stored

    @staticmethod
    def from_stored(stored: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        state = {}
        for name in names:
            parts = [stored.pop(theirs) for theirs in _stored_names(name)]
            tensor = torch.cat(parts) if len(parts) > 1 else parts[0]  # a single one stays mapped
            state[name] = tensor[None] if name.endswith("position_embedding") else tensor
        return state

    @classmethod
    def tensors(cls, cfg: VLMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = cls.to_stored(state)
        if cfg.lm_tie_weights:
            del tensors[HEAD]
        return tensors

    @staticmethod
    def patch_positions(grid: int) -> list[int]:
        """Idefics3's: fractions of the side, sorted into buckets.

        The arithmetic is float32, in the order of Idefics3VisionEmbeddings in transformers: for some grids, as 19,
        rounding gives two patches the same position, and the weights were trained with that.
        """
        fractions = torch.arange(grid, dtype=torch.float32, device="cpu") * (1.0 / torch.tensor(grid, device="cpu"))
        boundaries = torch.arange(1 / grid, 1.0, 1 / grid, device="cpu")
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True).tolist()

    def check_image_token_id(self, image_token_id: int, folder: Path) -> None:
        if image_token_id != self.image_token_id:
            raise CheckpointError(
                f"{folder / TOKENIZER}: the image token is {image_token_id}, but {CONFIG} has "
                f"image_token_id={self.image_token_id}"
            )

    @property
    def image_token_id(self) -> int:
        return self.config.get("image_token_id", IMAGE_TOKEN_ID)


def _stored_names(name: str) -> list[str]:
    """The files' names of one of our tensors; those of a qkv_proj are three."""
    matches = ((re.fullmatch(pattern, name), theirs) for pattern, theirs in NAMES.items())
    theirs = next(match.expand(theirs) for match, theirs in matches if match)
    return [theirs.replace("qkv", part) for part in "qkv"] if "qkv_proj" in theirs else [theirs]


def _without_dtype(raw: dict) -> dict:
    """Drop the dtype from a config.json: the weights themselves tell it."""
    kept = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    sections = {key: kept[key] for key in ("vision_config", "text_config") if key in kept}
    return kept | {key: _without_dtype(section) for key, section in sections.items()}


def _image_settings(files: Mapping[str, str], tile: int) -> dict[str, Any]:
    """The image processor's settings, complete; size and max_image_size as their longest edge in pixels.

    transformers 4 writes them to preprocessor_config.json, 5 into processor_config.json, where it looks first.
    """
    found = _parse(files, PROCESSOR).get("image_processor") or (_parse(files, PREPROCESSOR) or None)
    if not isinstance(found, dict):
        raise CheckpointError(f"{PREPROCESSOR} is missing; it says how this model's images are resized and split")
    for key, value in found.items():
        if key.startswith("do_") and key not in FOLLOWED and value:
            raise CheckpointError(f"{PREPROCESSOR}: {key}={value!r} is not supported; only false is")
    image = {}
    for key, (default, fits, words) in IMAGE_SETTINGS.items():
        image[key] = default if found.get(key) is None else found[key]
        if not fits(image[key]):
            raise CheckpointError(f"{PREPROCESSOR}: {key}={image[key]!r}, but only {words} is supported")
    for key in ("size", "max_image_size"):
        image[key] = image[key]["longest_edge"]
    if image["max_image_size"] != tile:
        raise CheckpointError(
            f"{PREPROCESSOR}: max_image_size of {image['max_image_size']} pixels, but the vision encoder reads "
            f"image_size={tile}; only equal sizes are supported"
        )
    return image


def _tokens(files: Mapping[str, str], raw: dict) -> dict[str, str]:
    """The tokens of TOKENS; SmolVLM's processor takes those that tokenizer_config.json names instead, if any."""
    if raw.get("model_type") == "idefics3" or TOKENIZER_CONFIG not in files:
        return TOKENS
    config = _parse(files, TOKENIZER_CONFIG)
    named = {**config}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        named |= config[key] if isinstance(config.get(key), dict) else {}
    tokens: dict[str, str] = {}
    for name, default in TOKENS.items():
        token = named.get(name, default)
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or len(text) > MAX_TOKEN:
            raise CheckpointError(f"{TOKENIZER_CONFIG}: {name}={text!r} is no text of at most {MAX_TOKEN} characters")
        tokens[name] = text
    return tokens


def _chat_template(files: Mapping[str, str]) -> str:
    """The chat template, searched in transformers' places and order."""
    if TEMPLATE in files:
        return files[TEMPLATE]
    for name in (LEGACY_TEMPLATE, PROCESSOR, TOKENIZER_CONFIG):
        template = _parse(files, name).get("chat_template")
        if isinstance(template, str) and template:
            return template
    raise CheckpointError(f"{TEMPLATE} is missing, and no other file has a chat_template; it lays out the prompts")


def _parse(files: Mapping[str, str], name: str) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    return parse_object(files.get(name, "{}"), name)
