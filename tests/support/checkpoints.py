"""Checkpoints as stock nanoVLM writes and loads them."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.checkpoint import save_checkpoint
from models.config import CHATML, VLMConfig
from models.formats.visionpsy import VisionPsy

HEAD, EMBEDDING, INV_FREQ = "decoder.head.weight", "decoder.token_embedding.weight", "decoder.rotary_embd.inv_freq"


def stock_shapes(cfg) -> dict[str, tuple[int, ...]]:
    """The names and shapes of nanoVLM's own modules."""
    V, L, W, F = cfg.vit_hidden_dim, cfg.lm_hidden_dim, cfg.vit_inter_dim, cfg.lm_inter_dim
    P, kv, embedding = cfg.vit_patch_size, cfg.lm_n_kv_heads * L // cfg.lm_n_heads, (cfg.lm_vocab_size, L)
    shapes = {
        "vision_encoder.patch_embedding.conv.weight": (V, 3, P, P),
        "vision_encoder.patch_embedding.conv.bias": (V,),
        "vision_encoder.patch_embedding.position_embedding": (1, (cfg.vit_img_size // P) ** 2, V),
        "vision_encoder.layer_norm.weight": (V,),
        "vision_encoder.layer_norm.bias": (V,),
        "MP.proj.weight": (L, V * cfg.mp_pixel_shuffle_factor**2),
        "decoder.token_embedding.weight": embedding,
        "decoder.norm.weight": (L,),
        "decoder.head.weight": embedding,
    }
    linears = {"attn.qkv_proj": (3 * V, V), "attn.out_proj": (V, V), "mlp.fc1": (W, V), "mlp.fc2": (V, W)}
    for i in range(cfg.vit_n_blocks):
        for name, shape in linears.items() | {("ln1", (V, V)), ("ln2", (V, V))}:
            shapes[f"vision_encoder.blocks.{i}.{name}.bias"] = shape[:1]
            shapes[f"vision_encoder.blocks.{i}.{name}.weight"] = shape[:1] if "ln" in name else shape
    for i in range(cfg.lm_n_blocks):
        block = {"attn.q_proj": (L, L), "attn.k_proj": (kv, L), "attn.v_proj": (kv, L), "attn.out_proj": (L, L)}
        block |= {"mlp.gate_proj": (F, L), "mlp.up_proj": (F, L), "mlp.down_proj": (L, F), "norm1": (L,), "norm2": (L,)}
        shapes |= {f"decoder.blocks.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def stock_model(cfg) -> nn.Module:
    """A model of zeros with stock nanoVLM's parameter names and shapes, for safetensors' strict loader."""
    model = nn.Module()
    for name, shape in stock_shapes(cfg).items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    model.decoder.rotary_embd = nn.Module()
    model.decoder.rotary_embd.register_buffer("inv_freq", torch.zeros(cfg.lm_hidden_dim // cfg.lm_n_heads // 2))
    if cfg.lm_tie_weights:
        model.decoder.head.weight = model.decoder.token_embedding.weight
    return model


BASE_SIZE = 400  # vocabulary size without extra tokens
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"]

BASE = {  # the keys of the oldest config.json
    "vit_hidden_dim": 16, "vit_inter_dim": 24, "vit_patch_size": 4, "vit_img_size": 16, "vit_n_heads": 2,
    "vit_dropout": 0.0, "vit_n_blocks": 2, "vit_ln_eps": 1e-6, "vit_cls_flag": False, "vit_model_type": "some/siglip",
    "lm_hidden_dim": 24, "lm_inter_dim": 32, "lm_rms_eps": 1e-5, "lm_re_base": 100000,
    "lm_max_position_embeddings": 1024, "lm_vocab_size": BASE_SIZE, "lm_n_heads": 6, "lm_n_kv_heads": 2,
    "lm_dropout": 0.0, "lm_n_blocks": 2, "lm_attn_scaling": 1.0, "lm_max_length": 79, "lm_use_tokens": False,
    "lm_tie_weights": True, "lm_model_type": "some/SmolLM2", "lm_tokenizer": "some/tokenizer", "lm_eos_token_id": 0,
    "mp_pixel_shuffle_factor": 2, "vlm_load_backbone_weights": True, "vlm_checkpoint_path": "checkpoints",
}  # fmt: skip

V01 = {
    "IMAGE_TOKEN_LENGTH": 4, "TOTAL_SEQUENCE_LENGTH": 83, "hf_repo_name": "nanoVLM",
    "lm_rope_factor": 1.0, "lm_beta_fast": 32, "lm_beta_slow": 1,
}  # fmt: skip


def tiles(grid):
    return {f"r{r}c{c}": f"<row_{r}_col_{c}>" for r in range(1, grid + 1) for c in range(1, grid + 1)}


def with_tokens(raw, **tokens):
    sizes = {"lm_base_vocab_size": BASE_SIZE, "extra_token_amount": len(tokens), "mp_image_token_length": 4}
    return raw | sizes | {"lm_vocab_size": BASE_SIZE + len(tokens), "vlm_extra_tokens": tokens, "hf_repo_name": "nano"}


def read_nanovlm(raw: dict) -> VLMConfig:
    return VLMConfig.from_dict(raw)


def raw_config(format_version) -> dict:
    if format_version == 1:
        return BASE | V01
    if format_version == 2:
        return with_tokens(BASE, image_token="<|image|>")
    if format_version == 3:
        return with_tokens(BASE, image_token="<|image|>") | {"lm_chat_template": CHATML}
    raw = {key: value for key, value in BASE.items() if key != "lm_eos_token_id"}
    raw |= {"lm_chat_template": CHATML, "max_img_size": 64}
    if format_version == 4:
        return with_tokens(raw, image_token="<|image|>", **tiles(4))
    raw = with_tokens(raw, image_token="<|image|>", global_image_token="<|global_image|>", **tiles(8))
    return raw | {"resize_to_max_side_len": False}


SMALL = {
    "vit_hidden_dim": 16, "vit_inter_dim": 24, "vit_n_heads": 2, "vit_n_blocks": 2,
    "lm_hidden_dim": 24, "lm_inter_dim": 32, "lm_n_heads": 6, "lm_n_kv_heads": 2, "lm_n_blocks": 2,
}  # fmt: skip


def small(cfg: VLMConfig, base: int) -> VLMConfig:
    """Keep the layout of images and text, and shrink the network."""
    if cfg.format_version == 1:
        return replace(cfg, **SMALL, lm_vocab_size=base)
    return replace(cfg, **SMALL, lm_base_vocab_size=base, lm_vocab_size=base + cfg.extra_token_amount)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    """Two models have the same tensors, bit by bit."""
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    different = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not different, different


PSY = {  # keys that the packager adds; of Flash the smallest side, 512 pixels, would be too large for these tiles
    "model_type": "visionpsynano", "is_flash": False, "resize_to_max_side_len": False, "resize_min_side_len": 16,
    "inference_max_img_size": None, "compile_inference": False, "eos_check_interval": 16, "vlm_checkpoint_path": None,
    "architectures": ["VisionPsyNanoForConditionalGeneration"], "auto_map": {}, "transformers_version": "5.0.0",
}  # fmt: skip


def write_visionpsy(folder, model, processor, joined):
    """Write a model in VisionPsy's layout: both of head and embedding, buffers, and ids in another order."""
    save_checkpoint(folder, model, processor.tokenizer.to_json())
    state = load_file(folder / "model.safetensors")
    if joined:
        state = VisionPsy.to_stored(state)
        assert any("gate_up_proj" in name for name in state) and not any("gate_proj" in name for name in state)
    state["decoder.token_embedding.weight"] = state["decoder.head.weight"].clone()
    state["decoder.rotary_embd.inv_freq"] = torch.ones(4)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["vlm_extra_tokens"] = dict(sorted(raw["vlm_extra_tokens"].items()))
    (folder / "config.json").write_text(json.dumps(raw | PSY))
