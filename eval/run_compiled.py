"""Generate from two graphs that AOTInductor compiled, in a process that knows torch and none of this project's code.

`python eval/run_compiled.py FOLDER NEW_TOKENS` reads prefill.pt2 and decode.pt2, which `compile_programs` in
models/kv_study/static_cache.py writes, and inputs.pt: the prompt's embeddings, and the shape of the cache.
"""

import sys
from pathlib import Path

import torch
from torch._inductor import aoti_load_package


def generate(folder: Path, new_tokens: int) -> list[list[int]]:
    """Greedy ids, a list of new_tokens per sequence."""
    prefill, decode = (aoti_load_package(str(folder / f"{name}.pt2")) for name in ("prefill", "decode"))
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    x = inputs["x"]  # (B, T, C)
    n_blocks, n_kv_heads, capacity, head_dim = inputs["cache_shape"]
    shape = (len(x), n_kv_heads, capacity, head_dim)
    cache = [(x.new_zeros(shape), x.new_zeros(shape)) for _ in range(n_blocks)]  # both graphs write it in place
    mask = torch.ones(len(x), capacity, dtype=torch.long)  # 0 at padding
    ids = [prefill(x, mask, torch.tensor(0), cache).argmax(-1, keepdim=True)]
    for position in range(x.size(1), x.size(1) + new_tokens - 1):
        ids.append(decode(ids[-1], mask, torch.tensor(position), cache).argmax(-1, keepdim=True))
    return torch.cat(ids, dim=1).tolist()


if __name__ == "__main__":
    print(generate(Path(sys.argv[1]), int(sys.argv[2])))
