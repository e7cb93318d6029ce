"""Build a new model from a pretrained SigLIP and a pretrained Llama.

Both are read as transformers writes them, from folders or Hub ids, safetensors only, in one file or several. A setting
with which our modules would compute something else raises CheckpointError with its key and value.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoint import CONFIG, INDEX, TOKENIZER, WEIGHTS, read_object, read_state_dict, snapshot_path
from models.common.errors import CheckpointError
from models.config import VLMConfig, extra_tokens
from models.formats.base import SIGLIP_CONFIG, SIGLIP_ONLY, llama_settings, settings
from models.formats.smolvlm import EMBEDDING, HEAD, SmolVLM
from models.modality_projector import ModalityProjector
from models.vision_language_model import VisionLanguageModel, empty_model, init_weights

FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors", TOKENIZER)
CONVOLUTION = "vision_encoder.patch_embedding.conv"
POSITIONS = "model.vision_model.embeddings.position_embedding.weight"

# Both files have the names of SmolVLM's parts behind other prefixes, and tensors that are not used.
SIGLIP_PREFIX = re.compile(r"(?:model\.)?(?:vision_tower\.)?(?:vision_model\.)?")
SIGLIP_UNUSED = re.compile(
    r"embeddings\.position_ids|head\..*|(?:text_model|language_model|multi_modal_projector)\..*|logit_scale|logit_bias"
    r"|lm_head\.weight"
)
LLAMA_UNUSED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Backbones:
    """A SigLIP and a Llama on disk, and the config of the model that they make together."""

    vision: Path
    language: Path
    cfg: VLMConfig
    grid: int  # patches along a side in the SigLIP checkpoint; cfg.vit_grid may differ


def from_backbones(
    vision: str | os.PathLike[str],
    language: str | os.PathLike[str],
    image_token_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options,
) -> VisionLanguageModel:
    """Build a model by `find_backbones` with the options and `read_backbones`."""
    return read_backbones(find_backbones(vision, language, **options), image_token_id, dtype)


def find_backbones(
    vision: str | os.PathLike[str],
    language: str | os.PathLike[str],
    vision_revision: str | None = None,
    language_revision: str | None = None,
    **changes,
) -> Backbones:
    """Locate or download both backbones, at given Hub revisions, and derive the config of the combined model.

    `changes` are fields of VLMConfig and take precedence. By default an image has at most 3 x 3 tiles and the prompt
    nanoVLM's extra tokens. A changed vit_img_size resizes the position embeddings. Raises CheckpointError if the
    backbones or the changes do not fit.
    """
    vision_folder = snapshot_path(vision, vision_revision, FILES)
    language_folder = snapshot_path(language, language_revision, FILES)
    vision_fields = _siglip_settings(vision_folder / CONFIG)
    fields = {
        "mp_pixel_shuffle_factor": 4,
        "vlm_extra_tokens": extra_tokens(8),
        "vit_model_type": str(vision),
        "lm_model_type": str(language),
        "lm_tokenizer": str(language),
        **vision_fields,
        **llama_settings(str(language_folder / CONFIG), read_object(language_folder / CONFIG)),
        **changes,
    }
    try:
        side = fields["vit_img_size"] // fields["vit_patch_size"] // fields["mp_pixel_shuffle_factor"]
        derived = {
            "extra_token_amount": len(fields["vlm_extra_tokens"]),
            "lm_vocab_size": fields["lm_base_vocab_size"] + len(fields["vlm_extra_tokens"]),
            "max_img_size": 3 * fields["vit_img_size"],
            "mp_image_token_length": side**2,
            "lm_max_length": min(VLMConfig.lm_max_length, fields["lm_max_position_embeddings"]),
        }
        cfg = VLMConfig(**derived | fields)
        grid = vision_fields["vit_img_size"] // vision_fields["vit_patch_size"]
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{vision} and {language} make no model: {error}") from None
    if cfg.lm_base_vocab_size is not None and cfg.lm_vocab_size < cfg.lm_base_vocab_size:
        raise CheckpointError(
            f"lm_vocab_size={cfg.lm_vocab_size} is less than the {cfg.lm_base_vocab_size} tokens of {language}"
        )
    return Backbones(vision_folder, language_folder, cfg, grid)


def read_backbones(
    backbones: Backbones,
    image_token_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    unit_pixels: bool = True,
) -> VisionLanguageModel:
    """Load both backbones into a new model in eval mode.

    With unit_pixels the patch convolution is changed to read pixels in [0, 1], as nanoVLM's layout gives them.
    image_token_id is the tokenizer's id of the image token, by default its index behind the base vocabulary. The
    projector and the rows of extra tokens, N(0, 0.02), are drawn from torch's global generator.
    """
    cfg = backbones.cfg
    if image_token_id is None:
        image_token_id = cfg.base_vocab_size + list(cfg.special_tokens).index("image_token")
    model = empty_model(cfg, image_token_id)
    empty = model.state_dict()
    state = _read_siglip(backbones, empty, dtype) | _read_llama(backbones, empty, dtype)
    if unit_pixels:
        state |= rescaled(state, unit_pixels=True)
    state["MP.proj.weight"] = ModalityProjector(cfg).apply(init_weights).proj.weight.detach().to(dtype)
    model.load_state_dict(state, assign=True)
    model.decoder.tie_weights()
    return model.eval()


def rescaled(state: Mapping[str, Tensor], unit_pixels: bool) -> dict[str, Tensor]:
    """Patch convolution for pixels x in [0, 1], as nanoVLM's, instead of SigLIP's y = 2x - 1; without, the inverse.

    W y + b = 2W x + (b - sum W), and W x + b = (W / 2) y + (b + sum W / 2).
    """
    weight, bias = (state[f"{CONVOLUTION}.{name}"] for name in ("weight", "bias"))
    if unit_pixels:
        bias = bias - weight.sum((1, 2, 3))
        weight = 2 * weight
    else:
        weight = weight / 2
        bias = bias + weight.sum((1, 2, 3))
    return {f"{CONVOLUTION}.weight": weight, f"{CONVOLUTION}.bias": bias}


def _siglip_settings(path: Path) -> dict:
    config = read_object(path)
    raw = config.get("vision_config", config)
    kind = raw.get("model_type", config.get("model_type")) if isinstance(raw, dict) else raw
    if str(kind).startswith("siglip2") or (isinstance(raw, dict) and "num_patches" in raw):
        raise CheckpointError(
            f"{path}: model_type={kind!r} with num_patches={raw.get('num_patches', 256)} is NaFlex, whose images have "
            "no fixed size; take a SigLIP2 of fixed resolution, whose model_type is siglip"
        )
    if kind not in ("siglip", "siglip_vision_model"):
        raise CheckpointError(f"{path}: model_type={kind!r} is not SigLIP's, siglip or siglip_vision_model")
    return settings(str(path), raw, SIGLIP_ONLY, SIGLIP_CONFIG)


def _read_siglip(backbones: Backbones, empty: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    ours = {name: tensor for name, tensor in empty.items() if name.startswith("vision_encoder.")}
    shapes = _shapes(ours) | {POSITIONS: (backbones.grid**2, backbones.cfg.vit_hidden_dim)}

    def rename(name: str) -> str | None:
        name = SIGLIP_PREFIX.sub("", name, count=1)
        return None if SIGLIP_UNUSED.fullmatch(name) else f"model.vision_model.{name}"

    stored = read_state_dict(backbones.vision, shapes, tied=None, dtype=dtype, rename=rename)
    stored[POSITIONS] = resize_positions(stored[POSITIONS], backbones.cfg.vit_grid)
    return SmolVLM.from_stored(stored, ours)


def _read_llama(backbones: Backbones, empty: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    cfg = backbones.cfg
    ours = {name: tensor for name, tensor in empty.items() if name.startswith("decoder.")}
    shapes = _shapes(ours) | dict.fromkeys(SmolVLM.tied, (cfg.base_vocab_size, cfg.lm_hidden_dim))

    def rename(name: str) -> str | None:
        name = name.removeprefix("model.")
        return None if LLAMA_UNUSED.fullmatch(name) else name if name == HEAD else f"model.text_model.{name}"

    tied = SmolVLM.tied if cfg.lm_tie_weights else None
    stored = read_state_dict(backbones.language, shapes, tied=tied, dtype=dtype, rename=rename)
    stored[EMBEDDING] = grow(stored[EMBEDDING], cfg.lm_vocab_size)
    stored[HEAD] = stored[EMBEDDING] if tied else grow(stored[HEAD], cfg.lm_vocab_size)
    return SmolVLM.from_stored(stored, ours)


def _shapes(ours: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in SmolVLM.to_stored(ours).items()}


def resize_positions(positions: Tensor, side: int) -> Tensor:
    """Resize position embeddings of a square grid (N, D) to side x side, (side^2, D), by bicubic interpolation."""
    old = round(len(positions) ** 0.5)
    if old == side:
        return positions
    grid = positions.T.reshape(1, -1, old, old)
    resized = F.interpolate(grid.float(), size=(side, side), mode="bicubic", align_corners=False)
    return resized.to(positions.dtype).flatten(2)[0].T.contiguous()


def grow(weight: Tensor, rows: int) -> Tensor:
    """Extend weight (n, D) to (rows, D) by random rows, N(0, 0.02), for tokens that the backbone does not have."""
    new = torch.randn(rows - len(weight), weight.size(1)) * 0.02
    return torch.cat([weight, new.to(weight.dtype)])
