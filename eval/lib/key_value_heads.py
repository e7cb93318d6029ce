"""MHA, GQA and MQA at equal width: bytes of the cache, measured and by the formula, and the time of a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from eval.lib.tables import table
from eval.lib.timing import interleave, measure_seconds
from models.config import VLMConfig
from models.language_model import LanguageModel


@dataclass(frozen=True)
class Heads:
    """The cache of a model with so many key and value heads."""

    name: str
    tokens: int
    bytes_used: int
    bytes_allocated: int
    formula: int  # 2 * blocks * kv_heads * head_dim * tokens * bytes of a number
    token_ms: float


@torch.inference_mode()
def compare_heads(
    device: torch.device, tokens: int = 512, width: int = 576, n_heads: int = 9, n_blocks: int = 4, rounds: int = 5
) -> list[Heads]:
    """SmolLM2-135M's width, 4 blocks, random weights: 9, 3 and 1 key and value heads."""
    steps, sizes = {}, {}
    for kind, n_kv_heads in (("MHA", n_heads), ("GQA", n_heads // 3), ("MQA", 1)):
        cfg = VLMConfig(
            lm_hidden_dim=width, lm_inter_dim=width, lm_n_heads=n_heads, lm_n_kv_heads=n_kv_heads,
            lm_n_blocks=n_blocks, lm_vocab_size=128, lm_base_vocab_size=None, extra_token_amount=None,
            vlm_extra_tokens=None, lm_max_position_embeddings=2 * tokens,
        )  # fmt: skip
        decoder, new = LanguageModel(cfg).to(device).eval(), torch.randn(1, 1, width, device=device)
        _, cache = decoder(torch.randn(1, tokens - 1, width, device=device))
        _, cache = decoder(new, None, cache, tokens - 1)
        name = f"{kind}, {n_kv_heads} of {n_heads} heads"
        steps[name] = partial(measure_seconds, partial(decoder, new, None, cache, tokens), device)
        formula = 2 * n_blocks * n_kv_heads * cfg.lm_head_dim * tokens * new.element_size()
        sizes[name] = tokens, sum(kv.bytes_used for kv in cache), sum(kv.bytes_allocated for kv in cache), formula
    timings = interleave(steps, rounds)
    return [Heads(name, *size, round(1000 * timings[name].median, 3)) for name, size in sizes.items()]


def heads_table(rows: Sequence[Heads]) -> str:
    cells = [["key and value heads", "tokens", "used KiB", "allocated KiB", "formula KiB", "bytes/token", "ms/token"]]
    for row in rows:
        sizes = [f"{size / 1024:,.0f}" for size in (row.bytes_used, row.bytes_allocated, row.formula)]
        token = f"{row.bytes_used / row.tokens:,.0f}"
        cells.append([row.name, str(row.tokens), *sizes, token, f"{row.token_ms:.2f}"])
    return table(cells)
