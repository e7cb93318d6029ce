"""Build a new model from a pretrained SigLIP and a pretrained Llama.

Both are read as transformers writes them, from folders or Hub ids, safetensors only, in one file or several. A setting
with which our modules would compute something else raises CheckpointError with its key and value.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoint import (
    CONFIG,
    INDEX,
    MAX_BLOCKS,
    TOKENIZER,
    WEIGHTS,
    Shapes,
    read_object,
    read_state_dict,
    snapshot_path,
)
from models.config import VLMConfig, extra_tokens
from models.errors import CheckpointError
from models.formats import base_vocab_size
from models.formats.transformers_names import SIGLIP_CONFIG, SIGLIP_ONLY, llama_settings, settings, translate
from models.modality_projector import ModalityProjector
from models.vision_language_model import VisionLanguageModel, empty_model, init_weights

FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors", TOKENIZER)
POSITIONS, EMBEDDING, HEAD = "patch_embedding.position_embedding", "token_embedding.weight", "head.weight"

# Their tensor name -> ours, None for tensors that are not used. Their q, k and v become the rows of our qkv_proj.
SIGLIP = {
    rf"(?:model\.)?(?:vision_tower\.)?(?:vision_model\.)?(?:{theirs})": ours
    for theirs, ours in {
        r"embeddings\.patch_embedding\.(weight|bias)": r"patch_embedding.conv.\1",
        r"embeddings\.position_embedding\.weight": r"patch_embedding.position_embedding",
        r"encoder\.layers\.(\d+)\.layer_norm([12])\.(weight|bias)": r"blocks.\1.ln\2.\3",
        r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v|out)_proj\.(weight|bias)": r"blocks.\1.attn.\2_proj.\3",
        r"encoder\.layers\.(\d+)\.mlp\.fc([12])\.(weight|bias)": r"blocks.\1.mlp.fc\2.\3",
        r"post_layernorm\.(weight|bias)": r"layer_norm.\1",
        r"embeddings\.position_ids|head\..*": None,
        r"(?:text_model|language_model|multi_modal_projector)\..*|logit_scale|logit_bias|lm_head\.weight": None,
    }.items()
}
LLAMA = {
    r"(?:model\.)?embed_tokens\.weight": r"token_embedding.weight",
    r"(?:model\.)?layers\.(\d+)\.self_attn\.([qkv])_proj\.weight": r"blocks.\1.attn.\2_proj.weight",
    r"(?:model\.)?layers\.(\d+)\.self_attn\.o_proj\.weight": r"blocks.\1.attn.out_proj.weight",
    r"(?:model\.)?layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight": r"blocks.\1.mlp.\2_proj.weight",
    r"(?:model\.)?layers\.(\d+)\.input_layernorm\.weight": r"blocks.\1.norm1.weight",
    r"(?:model\.)?layers\.(\d+)\.post_attention_layernorm\.weight": r"blocks.\1.norm2.weight",
    r"(?:model\.)?norm\.weight": r"norm.weight",
    r"lm_head\.weight": r"head.weight",
    r"(?:model\.)?layers\.(\d+)\.self_attn\.rotary_emb\.inv_freq": None,
}


@dataclass(frozen=True)
class Backbones:
    """A SigLIP and a Llama on disk, and the config of the model that they make together."""

    vision: Path
    language: Path
    cfg: VLMConfig
    grid: int  # patches along a side in the SigLIP checkpoint; cfg.vit_grid may differ


def from_backbones(
    vision: str | os.PathLike,
    language: str | os.PathLike,
    image_token_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options,
) -> VisionLanguageModel:
    """Build a model by `find_backbones` with the options and `read_backbones`."""
    return read_backbones(find_backbones(vision, language, **options), image_token_id, dtype)


def find_backbones(
    vision: str | os.PathLike,
    language: str | os.PathLike,
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
        cfg = VLMConfig(**_derived_fields(fields) | fields)
        grid = vision_fields["vit_img_size"] // vision_fields["vit_patch_size"]
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{vision} and {language} make no model: {error}") from None
    if cfg.lm_n_blocks + cfg.vit_n_blocks > MAX_BLOCKS:
        blocks = f"{cfg.vit_n_blocks} and {cfg.lm_n_blocks} blocks"
        raise CheckpointError(f"{vision} and {language}, of {blocks}: more than {MAX_BLOCKS} in all")
    if cfg.lm_base_vocab_size is not None and cfg.lm_vocab_size < cfg.lm_base_vocab_size:
        raise CheckpointError(
            f"lm_vocab_size={cfg.lm_vocab_size} is less than the {cfg.lm_base_vocab_size} tokens of {language}"
        )
    return Backbones(vision_folder, language_folder, cfg, grid)


def _derived_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of VLMConfig that follow from the given ones."""
    n_extra_tokens = len(fields["vlm_extra_tokens"])
    side = fields["vit_img_size"] // fields["vit_patch_size"] // fields["mp_pixel_shuffle_factor"]
    return {
        "extra_token_amount": n_extra_tokens,
        "lm_vocab_size": fields["lm_base_vocab_size"] + n_extra_tokens,
        "max_img_size": 3 * fields["vit_img_size"],
        "mp_image_token_length": side**2,
        "lm_max_length": min(VLMConfig.lm_max_length, fields["lm_max_position_embeddings"]),
    }


def read_backbones(
    backbones: Backbones, image_token_id: int | None = None, dtype: torch.dtype = torch.float32
) -> VisionLanguageModel:
    """Load both backbones into a new model in eval mode; its projector is randomly initialized.

    image_token_id is the tokenizer's id of the image token, by default its index behind the base vocabulary. The
    projector and the rows of extra tokens, N(0, 0.02), are drawn from torch's global generator.
    """
    cfg = backbones.cfg
    if image_token_id is None:
        image_token_id = base_vocab_size(cfg) + list(cfg.special_tokens).index("image_token")
    model = empty_model(cfg, image_token_id)
    state = {f"vision_encoder.{name}": tensor for name, tensor in _read_siglip(backbones, model, dtype).items()}
    state |= {f"decoder.{name}": tensor for name, tensor in _read_llama(backbones, model, dtype).items()}
    state["MP.proj.weight"] = ModalityProjector(cfg).apply(init_weights).proj.weight.detach().to(dtype)
    model.load_state_dict(state, assign=True)
    model.decoder.tie_weights()
    return model.eval()


def _siglip_settings(path: Path) -> dict:
    config = read_object(path)
    raw = config.get("vision_config", config)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: vision_config={raw!r} is not an object of settings")
    kind = raw.get("model_type", config.get("model_type"))
    if "num_patches" in raw or str(kind).startswith("siglip2"):
        raise CheckpointError(
            f"{path}: model_type={kind!r} with num_patches={raw.get('num_patches', 256)} is NaFlex, whose images have "
            "no fixed size; take a SigLIP2 of fixed resolution, whose model_type is siglip"
        )
    if kind not in ("siglip", "siglip_vision_model"):
        raise CheckpointError(f"{path}: model_type={kind!r} is not SigLIP's, siglip or siglip_vision_model")
    return settings(str(path), raw, SIGLIP_ONLY, SIGLIP_CONFIG)


def _read_siglip(backbones: Backbones, model: VisionLanguageModel, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.vision_encoder.state_dict().items()}
    shapes[POSITIONS] = (backbones.grid**2, backbones.cfg.vit_hidden_dim)
    fused = {name: [name.replace("qkv", part) for part in "qkv"] for name in shapes if "qkv_proj" in name}
    for name, parts in fused.items():
        rows, *columns = shapes.pop(name)
        shapes |= dict.fromkeys(parts, (rows // 3, *columns))
    state = _read(backbones.vision, SIGLIP, shapes, dtype)
    state[POSITIONS] = resize_positions(state[POSITIONS], backbones.cfg.vit_grid)[None]
    return state | {name: torch.cat([state.pop(part) for part in parts]) for name, parts in fused.items()}


def _read_llama(backbones: Backbones, model: VisionLanguageModel, dtype: torch.dtype) -> dict[str, Tensor]:
    cfg = backbones.cfg
    shapes = {name: tuple(tensor.shape) for name, tensor in model.decoder.state_dict().items()}
    shapes[EMBEDDING] = shapes[HEAD] = (base_vocab_size(cfg), cfg.lm_hidden_dim)
    state = _read(backbones.language, LLAMA, shapes, dtype, cfg.lm_tie_weights)
    state[EMBEDDING] = grow(state[EMBEDDING], cfg.lm_vocab_size)
    state[HEAD] = state[EMBEDDING] if cfg.lm_tie_weights else grow(state[HEAD], cfg.lm_vocab_size)
    return state


def _read(
    folder: Path, table: Mapping[str, str | None], shapes: Shapes, dtype: torch.dtype, tied: bool = False
) -> dict[str, Tensor]:
    """Read the tensors of the given names (ours) and shapes; those stored in dtype stay memory-mapped."""
    table = {**table} | {r"(.*)": r"\1"}  # tensors of other names are refused by read_state_dict
    pair = (EMBEDDING, HEAD) if tied else None
    return read_state_dict(folder, shapes, tied=pair, dtype=dtype, rename=lambda name: translate(name, table))


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
