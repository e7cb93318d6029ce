"""The memory of a KV cache: bytes used, allocated and per token, measured from its tensors and by the formula."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.lib.timing import interleave, measure_seconds
from models.cache import storage_bytes
from models.config import VLMConfig
from models.language_model import LanguageModel


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache of so many tokens, measured and by the formula."""

    design: str
    tokens: int
    used: int
    allocated: int
    formula: int  # 2 * blocks * kv_heads * head_dim * tokens * batch * bytes of a number
    cross: int = 0  # keys and values of the image, for cross-attention
    token_ms: float | None = None  # of decoding one token

    @property
    def per_token(self) -> float:
        return self.used / self.tokens


def kv_bytes(n_blocks: int, n_kv_heads: int, head_dim: int, tokens: int, batch: int, itemsize: int) -> int:
    """The formula: bytes of the keys and values of `tokens` tokens in each of `batch` sequences."""
    return 2 * n_blocks * n_kv_heads * head_dim * tokens * batch * itemsize


def measure_cache(
    design: str, tensors: Sequence[Tensor], tokens: int, formula: int, cross: Sequence[Tensor] = ()
) -> CacheMemory:
    """Measure keys and values (B, heads, tokens, head_dim) or (B, tokens, C), views of what is allocated."""
    used = sum(tensor.nbytes for tensor in tensors)
    return CacheMemory(design, tokens, used, storage_bytes(tensors), formula, storage_bytes(cross))


@torch.inference_mode()
def compare_heads(
    device: torch.device, tokens: int = 512, width: int = 576, n_heads: int = 9, n_blocks: int = 4, rounds: int = 5
) -> list[CacheMemory]:
    """MHA, GQA and MQA at equal width (SmolLM2-135M's, 4 blocks, random weights): 9, 3 and 1 key and value heads."""
    rows, steps = {}, {}
    for name, n_kv_heads in (("MHA", n_heads), ("GQA", n_heads // 3), ("MQA", 1)):
        cfg = VLMConfig(
            lm_hidden_dim=width, lm_inter_dim=width, lm_n_heads=n_heads, lm_n_kv_heads=n_kv_heads,
            lm_n_blocks=n_blocks, lm_vocab_size=128, lm_base_vocab_size=None, extra_token_amount=None,
            vlm_extra_tokens=None, lm_max_position_embeddings=2 * tokens,
        )  # fmt: skip
        decoder = LanguageModel(cfg).to(device).eval()
        _, cache = decoder(torch.randn(1, tokens - 1, width, device=device))
        new = torch.randn(1, 1, width, device=device)
        _, longer = decoder(new, None, cache, tokens - 1)

        def step(decoder=decoder, new=new, longer=longer) -> float:
            return measure_seconds(lambda: decoder(new, None, longer, tokens), device)

        steps[name] = step
        tensors = [tensor for kv in longer for tensor in (kv.key, kv.value)]
        formula = kv_bytes(n_blocks, n_kv_heads, cfg.lm_head_dim, tokens, 1, tensors[0].element_size())
        rows[f"{name}, {n_kv_heads} of {n_heads} heads"] = name, tensors, formula
    timings = interleave(steps, rounds)
    results = []
    for label, (name, tensors, formula) in rows.items():
        memory = measure_cache(label, tensors, tokens, formula)
        results.append(CacheMemory(**vars(memory) | {"token_ms": round(1000 * timings[name].median, 3)}))
    return results


def memory_table(title: str, rows: Sequence[CacheMemory]) -> str:
    """A line per cache, in KiB."""
    cells = ("tokens", "used", "allocated", "formula", "cross", "bytes/token")
    timed = any(row.token_ms is not None for row in rows)
    header = f"{title + ', KiB':38}" + "".join(f"{cell:>12}" for cell in cells) + (f"{'ms/token':>10}" if timed else "")
    lines = [header]
    for row in rows:
        sizes = "".join(f"{value / 1024:>12,.1f}" for value in (row.used, row.allocated, row.formula, row.cross))
        ms = f"{row.token_ms:>10.2f}" if row.token_ms is not None else ""
        lines.append(f"{row.design:38}{row.tokens:>12}{sizes}{row.per_token:>12,.0f}{ms}")
    return "\n".join(lines)
