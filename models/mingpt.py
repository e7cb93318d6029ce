"""minGPT and its twin with a key/value cache, side by side: read GPT first, then what GPT_kv does otherwise.

GPT is Karpathy's (github.com/karpathy/minGPT, names included) after GPT-2 (Radford et al. 2019). To choose one token it
reads all T before it again. GPT_kv keeps what attention made of them, a list `[k, v]` per block, and reads only what is
new. The twins share every weight: the state dict of either loads into the other.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from textwrap import shorten

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {  # n_layer, n_head, n_embd
    "openai-gpt": (12, 12, 768),  # 117M parameters
    "gpt2": (12, 12, 768),  # 124M
    "gpt2-medium": (24, 16, 1024),  # 350M
    "gpt2-large": (36, 20, 1280),  # 774M
    "gpt2-xl": (48, 25, 1600),  # 1558M
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}


@dataclass
class GPTConfig:
    """vocab_size, block_size, and either a model_type of SIZES or n_layer, n_head and n_embd."""

    model_type: str | None = None
    n_layer: int | None = None
    n_head: int | None = None
    n_embd: int | None = None
    vocab_size: int | None = None
    block_size: int | None = None  # the most tokens that are read at once
    embd_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    attn_pdrop: float = 0.1

    def complete(self) -> "GPTConfig":
        """A copy with every number filled in, or ValueError."""
        if self.model_type not in (None, *SIZES):
            raise ValueError(f"model_type={self.model_type} is none of {', '.join(SIZES)}")
        sizes = dict(zip(("n_layer", "n_head", "n_embd"), SIZES.get(self.model_type, ())))
        for name, size in sizes.items():
            if getattr(self, name) not in (None, size):
                raise ValueError(f"{name}={getattr(self, name)}, but {self.model_type} has {size}; drop either")
        cfg = replace(self, **sizes)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size"):
            if (getattr(cfg, name) or 0) < 1:
                raise ValueError(f"{name}={getattr(cfg, name)}; give a number from 1 on (sizes also by model_type)")
        if cfg.n_embd % cfg.n_head:
            raise ValueError(f"n_embd={cfg.n_embd} is no multiple of n_head={cfg.n_head}")
        return cfg


class NewGELU(nn.Module):
    """GELU's tanh approximation, as GPT-2 computes it (Hendrycks and Gimpel 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token looks ahead (Vaswani et al. 2017)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        may_look = torch.ones(config.block_size, config.block_size).tril()
        self.register_buffer("bias", may_look.view(1, 1, config.block_size, config.block_size))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, n_head, T, C / n_head), a view."""
        return x.view(x.size(0), x.size(1), self.n_head, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (self.heads(y) for y in self.c_attn(x).split(self.n_embd, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    attention = CausalSelfAttention

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = self.attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(config.n_embd, 4 * config.n_embd),
                act=NewGELU(),
                c_proj=nn.Linear(4 * config.n_embd, config.n_embd),
                dropout=nn.Dropout(config.resid_pdrop),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    block = Block

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config = config.complete()
        self.block_size = config.block_size
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.embd_pdrop),
            "h": nn.ModuleList(self.block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for name, p in self.named_parameters():  # norms keep torch's ones and zeros
            if name.endswith("c_proj.weight"):  # what a block adds shrinks with the number of blocks (GPT-2's paper)
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @staticmethod
    def get_default_config() -> GPTConfig:
        return GPTConfig()

    @classmethod
    def from_pretrained(cls, folder_or_name: str) -> "GPT":
        """GPT-2's weights in the Hub's format, from a folder or the Hub ("gpt2-xl"); float32, in eval mode."""
        from models.convert.gpt2 import read_gpt2

        settings, state = read_gpt2(folder_or_name)
        config = GPTConfig(**settings).complete()
        mask = torch.ones(1, 1, config.block_size, config.block_size).tril()
        state |= {f"transformer.h.{i}.attn.bias": mask for i in range(config.n_layer)}
        with torch.device("meta"):  # no time or memory for weights that are replaced anyway
            model = cls(config)
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:  # names each tensor that is missing, left over or of another shape
            raise ValueError(f"{folder_or_name}: {shorten(str(error), 300)}") from None
        return model.eval()

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """Embeddings (B, T - start, C) of the tokens idx (B, T) from start on, positions added."""
        T = idx.size(1)
        if not 0 < T <= self.block_size:
            raise ValueError(f"idx holds {T} tokens, but block_size={self.block_size}; pass 1 to {self.block_size}")
        pos = torch.arange(start, T, dtype=torch.long, device=idx.device)
        return self.transformer.drop(self.transformer.wte(idx[:, start:]) + self.transformer.wpe(pos))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, vocab_size) for ids (B, T) and, given targets (B, T), their loss; -1 asks for nothing."""
        x = self.embed(idx)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, loss_of(logits, targets)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, do_sample=False, top_k=None):
        """Ids (B, T) and then max_new_tokens more; only the last block_size tokens are looked at."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[0]
            idx = torch.cat((idx, choose(logits[:, -1], temperature, do_sample, top_k)), dim=1)
        return idx


def loss_of(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    return None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def choose(logits: Tensor, temperature: float, do_sample: bool, top_k: int | None) -> Tensor:
    """Logits (B, vocab_size) to ids (B, 1): the likeliest, or drawn from the top_k likeliest."""
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; do_sample=False takes the likeliest token")
    logits = logits / temperature
    if top_k is not None:
        if top_k < 1:
            raise ValueError(f"top_k={top_k} must be 1 or more, or None for all")
        least = torch.topk(logits, min(top_k, logits.size(-1))).values[:, [-1]]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probs = F.softmax(logits, dim=-1)
    return torch.multinomial(probs, num_samples=1) if do_sample else torch.topk(probs, k=1, dim=-1).indices


class Slab:
    """Room for a block's keys and values, k and v (B, room, C) each, of which `filled` tokens are written.

    In memory time is last: one channel of all tokens is one stretch, as the sums of attention over one query want it.
    """

    def __init__(self, k: Tensor, v: Tensor, room: int):
        self.k, self.v = (y.new_empty(y.size(0), y.size(2), room).transpose(1, 2) for y in (k, v))
        self.filled = 0
        self.write(k, v)

    def write(self, k: Tensor, v: Tensor) -> "KV":
        start, self.filled = self.filled, self.filled + k.size(1)
        self.k[:, start : self.filled] = k
        self.v[:, start : self.filled] = v
        return KV(self)


class KV(list):
    """The list [k, v], each (B, T, C), views of all that was written on a slab; a value like any other cache."""

    def __init__(self, slab: Slab):
        self.slab, self.views = slab, (slab.k[:, : slab.filled], slab.v[:, : slab.filled])
        super().__init__(self.views)

    def has_room(self, n: int) -> bool:
        """Whether n tokens may be written behind this cache: nobody has yet, they fit, and torch allows it."""
        (k, v), slab = self.views, self.slab
        untouched = self[0] is k and self[1] is v  # a list can be changed; then the slab is not what it says
        writable = torch.is_inference_mode_enabled() or not slab.k.is_inference()
        return untouched and writable and k.size(1) == slab.filled <= slab.k.size(1) - n


def extend(kv_cache: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """The cache and then the new tokens' k and v, (B, T_new, C): a longer list; the one given says what it said.

    A step writes its token where there is room behind the cache and copies no history. Where there is none, or another
    continuation has taken it, the history moves to a slab of twice the length.
    """
    if torch.is_grad_enabled():  # autograd wants fresh tensors, not views of a slab that changes
        return [torch.cat([kv_cache[0], k], dim=1), torch.cat([kv_cache[1], v], dim=1)]
    if isinstance(kv_cache, KV) and kv_cache.has_room(k.size(1)):
        return kv_cache.slab.write(k, v)
    return Slab(*kv_cache, room=2 * (kv_cache[0].size(1) + k.size(1))).write(k, v)


class CausalSelfAttention_kv(CausalSelfAttention):
    def forward(self, x: Tensor, kv_cache: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Continue kv_cache, [k, v] each (B, T_past, C), with x (B, T, C): y (B, T, C) and the longer cache."""
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        kv_cache = [k, v] if kv_cache is None else extend(kv_cache, k, v)
        k, v = kv_cache
        S = k.size(1)
        if T == 1:
            q = self.heads(q * (1.0 / math.sqrt(C // self.n_head)))
            y = self.attn_dropout(F.softmax(q @ self.heads(k).transpose(-2, -1), dim=-1)) @ self.heads(v)
        else:  # SDPA's is_causal is aligned top left, which is wrong behind a past
            mask = self.bias[:, :, S - T : S, :S] == 1 if S > T else None
            p = self.attn_dropout.p if self.training else 0.0
            q, k, v = self.heads(q), self.heads(k), self.heads(v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y)), kv_cache


class Block_kv(Block):
    attention = CausalSelfAttention_kv

    def forward(self, x: Tensor, kv_cache: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        y, kv_cache = self.attn(self.ln_1(x), kv_cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), kv_cache


class GPT_kv(GPT):
    block = Block_kv

    def read(self, idx, kv_cache=None, compute_first=False):
        """What of idx (B, T) the cache lacks: hidden states (B, T_new, C), and the cache of all T, one per block."""
        blocks = self.transformer.h
        if compute_first or not kv_cache:
            past, kv_cache = 0, [None] * len(blocks)
        elif len(kv_cache) != len(blocks):
            raise ValueError(f"kv_cache has {len(kv_cache)} blocks, but the model {len(blocks)}")
        elif len(kv_cache[0][0]) != len(idx) or (past := kv_cache[0][0].size(1)) >= idx.size(1):
            raise ValueError(
                f"idx is {tuple(idx.shape)}, but the cache holds {tuple(kv_cache[0][0].shape[:2])} tokens; "
                "pass the whole sequence, at least one token longer than the cache"
            )
        x, kv_cache = self.embed(idx, past), list(kv_cache)
        for i, block in enumerate(blocks):
            x, kv_cache[i] = block(x, kv_cache[i])
        return self.transformer.ln_f(x), kv_cache

    def forward(self, idx, targets=None, kv_cache=None, compute_first=False):
        """Logits (B, T_new, vocab_size) of the tokens read, their loss given targets (B, T), and the longer cache.

        idx (B, T) is the whole growing sequence, of which only what kv_cache lacks is read; compute_first reads it
        all and fills the cache from scratch. The cache given stays as it was and can be continued again.
        """
        x, kv_cache = self.read(idx, kv_cache, compute_first)
        logits = self.lm_head(x)
        return logits, loss_of(logits, None if targets is None else targets[:, -x.size(1) :]), kv_cache

    @torch.no_grad()
    def generate_kv(self, idx, max_new_tokens, temperature=1.0, do_sample=False, top_k=None):
        """What `generate` says, but each token is read once, up to block_size of them."""
        kv_cache = None
        for _ in range(max_new_tokens):
            shifted = idx.size(1) > self.block_size  # every token's position changes: what was kept is of no use
            x, kv_cache = self.read(idx[:, -self.block_size :], kv_cache, compute_first=shifted)
            logits = self.lm_head(x[:, -1])  # of a prompt, too, only the last token is asked for the next
            idx = torch.cat((idx, choose(logits, temperature, do_sample, top_k)), dim=1)
        return idx
