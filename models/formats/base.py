"""Settings of SigLIP and Llama in transformers' config.json."""

from collections.abc import Mapping
from typing import Any

from models.common.errors import CheckpointError

# Our field -> their key, and its default in transformers.
SIGLIP_CONFIG = {
    "vit_hidden_dim": ("hidden_size", 768), "vit_inter_dim": ("intermediate_size", 3072),
    "vit_patch_size": ("patch_size", 16), "vit_img_size": ("image_size", 224),
    "vit_n_heads": ("num_attention_heads", 12), "vit_n_blocks": ("num_hidden_layers", 12),
    "vit_ln_eps": ("layer_norm_eps", 1e-6),
}  # fmt: skip
LLAMA_CONFIG = {
    "lm_hidden_dim": ("hidden_size", 4096), "lm_inter_dim": ("intermediate_size", 11008),
    "lm_n_heads": ("num_attention_heads", 32), "lm_n_blocks": ("num_hidden_layers", 32),
    "lm_rms_eps": ("rms_norm_eps", 1e-6), "lm_max_position_embeddings": ("max_position_embeddings", 2048),
    "lm_base_vocab_size": ("vocab_size", 32000), "lm_tie_weights": ("tie_word_embeddings", False),
}  # fmt: skip

# Their key -> the only value with which our modules compute the same.
SIGLIP_ONLY = {"hidden_act": "gelu_pytorch_tanh", "num_channels": 3, "quantization_config": None}
LLAMA_ONLY = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None,
    "rope_interleaved": False, "partial_rotary_factor": 1, "quantization_config": None, "qk_layer_norms": False,
    "use_resampler": False,
}  # fmt: skip


def llama_settings(where: str, raw: Any) -> dict:
    """Fields of VLMConfig from the config of a Llama; `where` names the file in errors."""
    fields = settings(where, raw, LLAMA_ONLY, LLAMA_CONFIG)
    heads = fields["lm_n_heads"]
    width = fields["lm_hidden_dim"]
    head_dim = raw.get("head_dim")
    if head_dim is not None and head_dim * heads != width:
        raise CheckpointError(
            f"{where}: head_dim={head_dim} times num_attention_heads={heads} must be hidden_size={width} here"
        )
    theta = raw.get("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):  # newer files keep rope_theta in the latter
        rope = raw.get(key) or {}
        plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
        if not plain or rope.get("partial_rotary_factor", 1) != 1:
            raise CheckpointError(f"{where}: {key}={rope} changes RoPE, of which only the default is supported")
        theta = rope.get("rope_theta", theta)
    return fields | {"lm_n_kv_heads": raw.get("num_key_value_heads") or heads, "lm_re_base": theta}


def settings(
    where: str,
    raw: Any,
    only: Mapping[str, Any],
    fields: Mapping[str, tuple[str, Any]],
    defaults: Mapping[str, Any] | None = None,
) -> dict:
    """Our fields from their config.json; CheckpointError for a value that our modules do not support."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: {raw!r} is not an object of settings")
    for key, value in only.items():
        if raw.get(key, value) != value:
            raise CheckpointError(f"{where}: {key}={raw[key]!r}, but only {value!r} is supported")
    values = {}
    for ours, (theirs, default) in fields.items():
        values[ours] = raw.get(theirs, (defaults or {}).get(theirs, default))
        if not isinstance(values[ours], int if type(default) is int else (type(default), int)):
            raise CheckpointError(f"{where}: {theirs}={values[ours]!r} is not of type {type(default).__name__}")
    return values
