"""Floating-point operations of a generation in theory: matmuls, a multiply-add counted as two.

Norms, softmax and rotary embeddings are left out; they are a few percent. Attention is counted over the positions that
a token may attend to, not over the square that an implementation may compute. The vision encoder, the same in every
design, is not counted.
"""

from collections.abc import Callable

from models.config import VLMConfig

ReadCost = Callable[[int, int], int]  # (start, stop) -> FLOPs to read tokens start ... stop - 1 and choose the next


def language_model(cfg: VLMConfig, window: int | None = None) -> ReadCost:
    """Of models/language_model.py: q, out, k, v, three MLP matrices, attention, and the head for the last token.

    With a window, each token attends to that many.
    """
    C, kv = cfg.lm_hidden_dim, cfg.lm_n_kv_heads * cfg.lm_head_dim
    weights = 2 * C * C + 2 * C * kv + 3 * C * cfg.lm_inter_dim

    def read(start: int, stop: int) -> int:
        block = 2 * weights * (stop - start) + 4 * C * _attended_pairs(start, stop, window)
        return cfg.lm_n_blocks * block + 2 * C * cfg.lm_vocab_size

    return read


def text_decoder(cfg: VLMConfig, n_patches: int) -> ReadCost:
    """Of models/kv_study/encoder_decoder.py; the image's keys and values are made at position 0."""
    C = cfg.lm_hidden_dim
    weights = 4 * C * C + 2 * C * C + 8 * C * C  # self-attention, cross-attention's query and out, MLP

    def read(start: int, stop: int) -> int:
        n = stop - start
        cross_kv = 0 if start else 2 * 2 * C * C * n_patches
        attention = 4 * C * (_attended_pairs(start, stop) + n * n_patches)
        return cfg.lm_n_blocks * (2 * weights * n + attention + cross_kv) + 2 * C * cfg.lm_vocab_size

    return read


def _attended_pairs(start: int, stop: int, window: int | None = None) -> int:
    """Pairs of a token read and a position it attends to: itself and all before, or the last `window`."""
    if window is not None:
        return sum(min(position + 1, window) for position in range(start, stop))
    return (stop * (stop + 1) - start * (start + 1)) // 2


def generation(read: ReadCost, prompt: int, new_tokens: int, cached: bool) -> int:
    """FLOPs from a prompt of so many tokens to the last new token; without a cache every step reads all tokens."""
    steps = (read(prompt + i - 1 if cached else 0, prompt + i) for i in range(1, new_tokens))
    return read(0, prompt) + sum(steps)
