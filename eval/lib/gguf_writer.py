"""Write a language model as a GGUF file for llama.cpp, without a tokenizer (needs the extra `peers`)."""

from pathlib import Path

from torch import Tensor

from models.language_model import LanguageModel
from nanovlm.errors import MissingExtraError

GGUF_TYPES = ("F32", "BF16", "Q8_0", "Q4_0")


def to_llama_rope(weight: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of a q or k projection: llama.cpp rotates neighboring channels, this project the two halves."""
    return weight.view(n_heads, 2, -1, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def gguf_tensors(decoder: LanguageModel) -> dict[str, Tensor]:
    """The decoder's weights under llama.cpp's names, in llama.cpp's order of channels."""
    tensors = {"token_embd": decoder.token_embedding.weight, "output_norm": decoder.norm.weight}
    if not decoder.cfg.lm_tie_weights:
        tensors["output"] = decoder.head.weight
    for i, block in enumerate(decoder.blocks):
        attn, mlp = block.attn, block.mlp
        tensors |= {
            f"blk.{i}.attn_norm": block.norm1.weight,
            f"blk.{i}.attn_q": to_llama_rope(attn.q_proj.weight, attn.n_heads),
            f"blk.{i}.attn_k": to_llama_rope(attn.k_proj.weight, attn.n_kv_heads),
            f"blk.{i}.attn_v": attn.v_proj.weight,
            f"blk.{i}.attn_output": attn.out_proj.weight,
            f"blk.{i}.ffn_norm": block.norm2.weight,
            f"blk.{i}.ffn_gate": mlp.gate_proj.weight,
            f"blk.{i}.ffn_up": mlp.up_proj.weight,
            f"blk.{i}.ffn_down": mlp.down_proj.weight,
        }
    return tensors


def write_gguf(decoder: LanguageModel, path: Path, gguf_type: str) -> None:
    """Write a float32 decoder; matrices are stored as one of GGUF_TYPES, norms as float32."""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError('GGUF files need the extra peers: pip install "nanovlm[peers]"') from None
    cfg, writer = decoder.cfg, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(cfg.lm_max_position_embeddings)
    writer.add_embedding_length(cfg.lm_hidden_dim)
    writer.add_block_count(cfg.lm_n_blocks)
    writer.add_feed_forward_length(cfg.lm_inter_dim)
    writer.add_head_count(cfg.lm_n_heads)
    writer.add_head_count_kv(cfg.lm_n_kv_heads)
    writer.add_layer_norm_rms_eps(cfg.lm_rms_eps)
    writer.add_rope_freq_base(cfg.lm_re_base)
    writer.add_rope_dimension_count(cfg.lm_head_dim)
    writer.add_vocab_size(cfg.lm_vocab_size)
    writer.add_tokenizer_model("none")
    stored = gguf.GGMLQuantizationType[gguf_type]
    for name, tensor in gguf_tensors(decoder).items():
        array = tensor.detach().float().contiguous().numpy()
        if tensor.dim() == 1 or gguf_type == "F32":
            writer.add_tensor(f"{name}.weight", array)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
