"""What theory says a generation costs: floating-point operations of its matrix products, a multiply-add counted as two.

Norms, softmax and rotary positions are left out; they are a few percent. Attention is counted over what a token may
see, not over the square that an implementation may compute. The vision encoder, the same for all, is not counted.
"""

from collections.abc import Callable

from models.config import VLMConfig

ReadOptions = Callable[
    [int, int], int
]  # FLOPs to read tokens start ... stop - 1 behind start others and choose one more


def language_model(cfg: VLMConfig) -> ReadOptions:
    """Of models/language_model.py: q and out, k and v, three matrices of the MLP, and the head for one token."""
    C, kv = cfg.lm_hidden_dim, cfg.lm_n_kv_heads * cfg.lm_head_dim
    weights = 2 * C * C + 2 * C * kv + 3 * C * cfg.lm_inter_dim

    def read(start: int, stop: int) -> int:
        return cfg.lm_n_blocks * (2 * weights * (stop - start) + 4 * C * _seen(start, stop)) + 2 * C * cfg.lm_vocab_size

    return read


def text_decoder(cfg: VLMConfig, n_patches: int) -> ReadOptions:
    """Of models/kv_study/encoder_decoder.py; who reads from the start on also makes the picture's keys and values."""
    C = cfg.lm_hidden_dim
    weights = 4 * C * C + 2 * C * C + 8 * C * C  # self-attention, cross-attention's query and out, MLP

    def read(start: int, stop: int) -> int:
        n = stop - start
        picture = 0 if start else 2 * 2 * C * C * n_patches
        attention = 4 * C * (_seen(start, stop) + n * n_patches)
        return cfg.lm_n_blocks * (2 * weights * n + attention + picture) + 2 * C * cfg.lm_vocab_size

    return read


def _seen(start: int, stop: int) -> int:
    """Pairs of a token read and one that it sees: itself and all before."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def generation(read: ReadOptions, prompt: int, new_tokens: int, cached: bool) -> int:
    """FLOPs from a prompt of so many tokens to the last of new_tokens; a token is read once, or for each after it."""
    first = read(0, prompt)
    return first + sum(read(prompt + i - 1 if cached else 0, prompt + i) for i in range(1, new_tokens))
