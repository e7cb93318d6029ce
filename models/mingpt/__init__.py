"""minGPT, and the same model with a key/value cache: read `model`, then how `cached` differs from it.

GPT recomputes the whole sequence for every new token. GPT_kv caches the keys and values of past tokens and computes
only the new ones. Both classes have the same parameters: the state dict of either loads into the other.

The classes and signatures are those of the KV-cache homework at github.com/dataflowr/llm_efficiency, so its checker,
its scripts and minGPT's Trainer run on this package.
"""

from models.mingpt.cached import Block_kv, CausalSelfAttention_kv, GPT_kv, KVList, append_kv
from models.mingpt.config import SIZES, Config, GPTConfig
from models.mingpt.model import GPT, Block, CausalSelfAttention, NewGELU, cross_entropy, next_token

__all__ = [
    "GPT", "SIZES", "Block", "Block_kv", "CausalSelfAttention", "CausalSelfAttention_kv", "Config", "GPTConfig",
    "GPT_kv", "KVList", "NewGELU", "append_kv", "cross_entropy", "next_token",
]  # fmt: skip
