"""llama.cpp as a peer: a decoder's weights as a GGUF file, and llama.cpp's greedy decoding of it (extra: peers)."""

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from models.language_model import LanguageModel

KINDS = {"F32": Kind.F32, "BF16": Kind.BF16, "Q8_0": Kind.Q8_0, "Q4_0": Kind.Q4_0}
MAX_TOKENS = 512  # of one sequence


@llama_cpp.llama_log_callback
def _quiet(level, text, user_data):
    pass


def interleave(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a q or k projection in llama.cpp's order: each channel beside the one that it is turned with."""
    return weight.view(n_heads, 2, -1, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def write_gguf(decoder: LanguageModel, path: Path, kind: str) -> None:
    """A float32 decoder as a file for llama.cpp, its matrices stored as kind, without a tokenizer."""
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

    def add(name: str, tensor: Tensor) -> None:
        numbers, stored = tensor.detach().float().contiguous().numpy(), KINDS[kind]
        if tensor.dim() == 1 or stored == Kind.F32:
            writer.add_tensor(f"{name}.weight", numbers)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, stored), raw_dtype=stored)

    add("token_embd", decoder.token_embedding.weight)
    add("output_norm", decoder.norm.weight)
    if not cfg.lm_tie_weights:
        add("output", decoder.head.weight)
    for i, block in enumerate(decoder.blocks):
        attn, mlp = block.attn, block.mlp
        add(f"blk.{i}.attn_norm", block.norm1.weight)
        add(f"blk.{i}.attn_q", interleave(attn.q_proj.weight, attn.n_heads))
        add(f"blk.{i}.attn_k", interleave(attn.k_proj.weight, attn.n_kv_heads))
        add(f"blk.{i}.attn_v", attn.v_proj.weight)
        add(f"blk.{i}.attn_output", attn.out_proj.weight)
        add(f"blk.{i}.ffn_norm", block.norm2.weight)
        add(f"blk.{i}.ffn_gate", mlp.gate_proj.weight)
        add(f"blk.{i}.ffn_up", mlp.up_proj.weight)
        add(f"blk.{i}.ffn_down", mlp.down_proj.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A GGUF file in llama.cpp, decoding so many sequences at once on so many threads."""

    def __init__(self, path: Path, threads: int, rows: int = 1):
        llama_cpp.llama_log_set(_quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = MAX_TOKENS * rows, MAX_TOKENS, rows
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(MAX_TOKENS, 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def read(self, ids: list[list[int]], start_pos: int) -> list[int]:
        """Each sequence goes on with its ids at start_pos; what stood there is forgotten. Returns the likeliest."""
        memory, batch = llama_cpp.llama_get_memory(self.context), self.batch
        places = [(row, start_pos + i, token) for row, new in enumerate(ids) for i, token in enumerate(new)]
        for row in range(len(ids)):
            llama_cpp.llama_memory_seq_rm(memory, row, start_pos, -1)
        last = []
        for at in range(0, len(places), MAX_TOKENS):
            part = places[at : at + MAX_TOKENS]
            batch.n_tokens, ends = len(part), []
            for i, (row, position, token) in enumerate(part):
                is_last = position == start_pos + len(ids[row]) - 1
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, row
                batch.logits[i] = is_last
                ends += [i] * is_last
            if code := llama_cpp.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode: {code}")
            last += [self._likeliest(i) for i in ends]
        return last

    def _likeliest(self, i: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, i)
        address = ctypes.addressof(logits.contents)
        return int(
            torch.frombuffer((ctypes.c_float * self.vocabulary).from_address(address), dtype=torch.float32).argmax()
        )
