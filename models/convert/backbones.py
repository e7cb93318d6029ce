"""A new model from a pretrained SigLIP and a pretrained Llama: their names and settings as tables, and what is refused.

Both are read from folders or Hub ids as transformers writes them, safetensors only, in one file or several. What our
modules would load but compute otherwise is refused with the key and its value.
"""

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint import CONFIG, MOST_BLOCKS, TOKENIZER, WEIGHTS, read_object, snapshot_path
from models.config import VLMConfig, extra_tokens
from models.errors import CheckpointError
from models.modality_projector import ModalityProjector
from models.vision_language_model import VisionLanguageModel, init_weights

INDEX = "model.safetensors.index.json"
FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors", TOKENIZER)
POSITIONS, EMBEDDING, HEAD = "patch_embedding.position_embedding", "token_embedding.weight", "head.weight"

# Their name -> ours, None for what has no place here. Their q, k and v become the rows of our qkv_proj.
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

# Our field -> their key, and what a missing key means in transformers.
SIGLIP_CONFIG = {
    "vit_hidden_dim": ("hidden_size", 768),
    "vit_inter_dim": ("intermediate_size", 3072),
    "vit_patch_size": ("patch_size", 16),
    "vit_img_size": ("image_size", 224),
    "vit_n_heads": ("num_attention_heads", 12),
    "vit_n_blocks": ("num_hidden_layers", 12),
    "vit_ln_eps": ("layer_norm_eps", 1e-6),
}
LLAMA_CONFIG = {
    "lm_hidden_dim": ("hidden_size", 4096),
    "lm_inter_dim": ("intermediate_size", 11008),
    "lm_rms_eps": ("rms_norm_eps", 1e-6),
    "lm_max_position_embeddings": ("max_position_embeddings", 2048),
    "lm_base_vocab_size": ("vocab_size", 32000),
    "lm_n_heads": ("num_attention_heads", 32),
    "lm_n_blocks": ("num_hidden_layers", 32),
    "lm_tie_weights": ("tie_word_embeddings", False),
}

# Their key -> the only value that our modules compute.
SIGLIP_ONLY = {"hidden_act": "gelu_pytorch_tanh", "num_channels": 3, "quantization_config": None}
LLAMA_ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}


@dataclass(frozen=True)
class Backbones:
    """A SigLIP and a Llama, found and understood: where they are, and the config of the model they make."""

    vision: Path
    language: Path
    cfg: VLMConfig
    grid: int  # places along a side for which vision has positions; cfg.vit_grid may be another number


def from_backbones(
    vision: str | os.PathLike,
    language: str | os.PathLike,
    image_token_id: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options,
) -> VisionLanguageModel:
    """`find_backbones` with the options, then `read_backbones`."""
    return read_backbones(find_backbones(vision, language, **options), image_token_id, dtype)


def find_backbones(
    vision: str | os.PathLike,
    language: str | os.PathLike,
    vision_revision: str | None = None,
    language_revision: str | None = None,
    **changes,
) -> Backbones:
    """Find both, folders or Hub ids (and a branch, tag or commit there), and derive the config of what they make.

    `changes` are fields of VLMConfig, such as mp_pixel_shuffle_factor, and have the last word. Unless changed, a
    picture has at most 3 x 3 tiles and nanoVLM's extra tokens. Another vit_img_size resizes the grid of positions. A
    CheckpointError says what does not fit.
    """
    sees_in, says_in = snapshot_path(vision, vision_revision, FILES), snapshot_path(language, language_revision, FILES)
    sees, says = _siglip_settings(sees_in / CONFIG), _llama_settings(says_in / CONFIG)
    names = {"vit_model_type": str(vision), "lm_model_type": str(language), "lm_tokenizer": str(language)}
    fields = {"mp_pixel_shuffle_factor": 4, "vlm_extra_tokens": extra_tokens(8), **names, **sees, **says, **changes}
    derived = {}
    try:
        derived["extra_token_amount"] = len(fields["vlm_extra_tokens"])
        derived["lm_vocab_size"] = fields["lm_base_vocab_size"] + derived["extra_token_amount"]
        derived["max_img_size"] = 3 * fields["vit_img_size"]
        places = fields["vit_img_size"] // fields["vit_patch_size"] // fields["mp_pixel_shuffle_factor"]
        derived["mp_image_token_length"] = places**2
        derived["lm_max_length"] = min(VLMConfig.lm_max_length, fields["lm_max_position_embeddings"])
        cfg, grid = VLMConfig(**derived | fields), sees["vit_img_size"] // sees["vit_patch_size"]
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{vision} and {language} make no model: {error}") from None
    if cfg.lm_n_blocks + cfg.vit_n_blocks > MOST_BLOCKS:
        told = f"{vision} and {language}, of {cfg.vit_n_blocks} and {cfg.lm_n_blocks} blocks"
        raise CheckpointError(f"{told}: more than {MOST_BLOCKS} in all")
    if cfg.lm_vocab_size < cfg.lm_base_vocab_size:
        raise CheckpointError(
            f"lm_vocab_size={cfg.lm_vocab_size} is less than the {cfg.lm_base_vocab_size} tokens that {language} knows"
        )
    return Backbones(sees_in, says_in, cfg, grid)


def read_backbones(
    found: Backbones, image_token_id: int | None = None, dtype: torch.dtype = torch.float32
) -> VisionLanguageModel:
    """A model that sees as found.vision and speaks as found.language, in eval mode; what joins them is to be trained.

    image_token_id is the tokenizer's id of the image token, by default its place after the base vocabulary. The
    projector and the rows of extra tokens, N(0, 0.02), are drawn from torch's global generator.
    """
    cfg = found.cfg
    if image_token_id is None:
        image_token_id = cfg.lm_base_vocab_size + list(cfg.vlm_extra_tokens).index("image_token")
    with torch.device("meta"):
        model = VisionLanguageModel(cfg, image_token_id)
    sees, says = _read_siglip(found, model, dtype), _read_llama(found, model, dtype)
    state = {f"vision_encoder.{name}": tensor for name, tensor in sees.items()}
    state |= {f"decoder.{name}": tensor for name, tensor in says.items()}
    state["MP.proj.weight"] = ModalityProjector(cfg).apply(init_weights).proj.weight.detach().to(dtype)
    model.load_state_dict(state, assign=True)
    model.decoder.tie_weights()
    return model.eval()


def translate(name: str, table: Mapping[str, str | None]) -> str | None:
    """The name that the table gives, None for a tensor without a place; a CheckpointError if it does not know it."""
    for pattern, replacement in table.items():
        if match := re.fullmatch(pattern, name):
            return replacement and match.expand(replacement)
    raise CheckpointError(f"tensor {name!r} has no place in this architecture")


def _siglip_settings(path: Path) -> dict:
    whole = read_object(path)
    raw = whole.get("vision_config", whole)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: vision_config={raw!r} is no object of settings")
    kind = raw.get("model_type", whole.get("model_type"))
    if "num_patches" in raw or str(kind).startswith("siglip2"):
        raise CheckpointError(
            f"{path}: model_type={kind!r} with num_patches={raw.get('num_patches', 256)} is NaFlex, whose images have "
            "no fixed size; take a SigLIP2 of fixed resolution, whose model_type is siglip"
        )
    if kind not in ("siglip", "siglip_vision_model"):
        raise CheckpointError(f"{path}: model_type={kind!r} is not SigLIP's, siglip or siglip_vision_model")
    return _settings(path, raw, SIGLIP_ONLY, SIGLIP_CONFIG)


def _llama_settings(path: Path) -> dict:
    raw = read_object(path)
    fields = _settings(path, raw, LLAMA_ONLY, LLAMA_CONFIG)
    heads, width, head_dim = fields["lm_n_heads"], fields["lm_hidden_dim"], raw.get("head_dim")
    if head_dim is not None and head_dim * heads != width:
        raise CheckpointError(
            f"{path}: head_dim={head_dim} times num_attention_heads={heads} must be hidden_size={width} here"
        )
    theta = raw.get("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):  # newer files keep rope_theta in the latter
        rope = raw.get(key) or {}
        plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
        if not plain or rope.get("partial_rotary_factor", 1) != 1:
            raise CheckpointError(f"{path}: {key}={rope} changes RoPE, of which only the default is computed here")
        theta = rope.get("rope_theta", theta)
    return fields | {"lm_n_kv_heads": raw.get("num_key_value_heads") or heads, "lm_re_base": theta}


def _settings(path: Path, raw: dict, only: dict, fields: dict) -> dict:
    """Our fields out of their config.json, unless something in it is not what our modules compute."""
    for key, value in only.items():
        if raw.get(key, value) != value:
            raise CheckpointError(f"{path}: {key}={raw[key]!r}, but only {value!r} is computed here")
    values = {ours: raw.get(theirs, default) for ours, (theirs, default) in fields.items()}
    for ours, (theirs, default) in fields.items():
        if not isinstance(values[ours], int if type(default) is int else (type(default), int)):
            raise CheckpointError(f"{path}: {theirs}={values[ours]!r} is no {type(default).__name__}")
    return values


def _read_siglip(found: Backbones, model: VisionLanguageModel, dtype: torch.dtype) -> dict[str, Tensor]:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.vision_encoder.state_dict().items()}
    wanted[POSITIONS] = (found.grid**2, found.cfg.vit_hidden_dim)
    joined = {name: [name.replace("qkv", part) for part in "qkv"] for name in wanted if "qkv_proj" in name}
    for name, parts in joined.items():
        rows, *columns = wanted.pop(name)
        wanted |= dict.fromkeys(parts, (rows // 3, *columns))
    state = _read(found.vision, SIGLIP, wanted, dtype)
    state[POSITIONS] = resize_positions(state[POSITIONS], found.cfg.vit_grid)[None]
    return state | {name: torch.cat([state.pop(part) for part in parts]) for name, parts in joined.items()}


def _read_llama(found: Backbones, model: VisionLanguageModel, dtype: torch.dtype) -> dict[str, Tensor]:
    cfg = found.cfg
    wanted = {name: tuple(tensor.shape) for name, tensor in model.decoder.state_dict().items()}
    wanted[EMBEDDING] = wanted[HEAD] = (cfg.lm_base_vocab_size, cfg.lm_hidden_dim)
    state = _read(found.language, LLAMA, wanted, dtype, cfg.lm_tie_weights)
    state[EMBEDDING] = grow(state[EMBEDDING], cfg.lm_vocab_size)
    state[HEAD] = state[EMBEDDING] if cfg.lm_tie_weights else grow(state[HEAD], cfg.lm_vocab_size)
    return state


def _read(folder: Path, table, wanted: dict[str, tuple[int, ...]], dtype, tied=False) -> dict[str, Tensor]:
    """The wanted tensors, under our names, of the shapes given; those already in dtype stay memory-mapped."""
    with ExitStack() as stack:
        try:
            files = _open(folder, stack)
            source = {ours: name for name in files if (ours := translate(name, table))}
            if tied:
                wanted = {name: shape for name, shape in wanted.items() if name != HEAD}
                if HEAD in source and EMBEDDING in source:
                    head, embedding = (files[source[name]].get_tensor(source[name]) for name in (HEAD, EMBEDDING))
                    if not torch.equal(head, embedding):
                        raise CheckpointError(
                            f"tie_word_embeddings=true, but {source[HEAD]} and {source[EMBEDDING]} differ"
                        )
                if HEAD in source:  # either name of a tied pair will do
                    source[EMBEDDING] = source.pop(HEAD)
            if missing := sorted(wanted.keys() - source.keys()):
                raise CheckpointError(f"{len(missing)} tensors are missing, first the one for {missing[0]}")
            if surplus := sorted(source.keys() - wanted.keys()):
                raise CheckpointError(
                    f"{len(surplus)} tensors are more than {CONFIG} has a place for, first {source[surplus[0]]!r}"
                )
            for name, shape in wanted.items():
                if (found := tuple(files[source[name]].get_slice(source[name]).get_shape())) != shape:
                    raise CheckpointError(f"{source[name]} is {found}, but {CONFIG} asks for {shape}")
            return {name: files[source[name]].get_tensor(source[name]).to(dtype) for name in wanted}
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: a weight file cannot be read, it may be truncated: {error}") from None


def _open(folder: Path, stack: ExitStack) -> dict:
    """Each tensor's name -> the open safetensors file that holds it: one, or as many as the index names."""
    names = {WEIGHTS}
    if not (folder / WEIGHTS).exists():
        if not (folder / INDEX).exists():
            raise CheckpointError(
                f"neither {WEIGHTS} nor {INDEX} is there; pickled weights (*.bin) may run code and are not read: "
                "save them as safetensors"
            )
        weight_map = read_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(name).name != name for name in weight_map.values()):
            raise CheckpointError(f"{INDEX} has no weight_map of tensors to files beside it")
        names = set(weight_map.values())
    files = {}
    for name in sorted(names):
        file = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
        files |= dict.fromkeys(file.keys(), file)
    return files


def resize_positions(positions: Tensor, side: int) -> Tensor:
    """Position embeddings of a square grid, (N, D), for a grid of side x side, (side^2, D): bicubic interpolation."""
    old = round(len(positions) ** 0.5)
    if old == side:
        return positions
    grid = positions.T.reshape(1, -1, old, old)
    resized = F.interpolate(grid.float(), size=(side, side), mode="bicubic", align_corners=False)
    return resized.to(positions.dtype).flatten(2)[0].T.contiguous()


def grow(weight: Tensor, rows: int) -> Tensor:
    """(n, D) with more rows, N(0, 0.02), for tokens that the backbone did not know: (rows, D); the old ones stay."""
    new = torch.randn(rows - len(weight), weight.size(1)) * 0.02
    return torch.cat([weight, new.to(weight.dtype)])
