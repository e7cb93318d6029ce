"""minGPT, and the same model with a key/value cache: read GPT first, then how GPT_kv differs.

GPT is Karpathy's (github.com/karpathy/minGPT, names included), after GPT-2 (Radford et al. 2019). It recomputes the
whole sequence for every new token. GPT_kv caches the keys and values of past tokens, a list `[k, v]` per block, and
computes only the new tokens. Both classes have the same parameters: the state dict of either loads into the other.

The classes and signatures are those of the KV-cache homework at github.com/dataflowr/llm_efficiency, so its checker,
its scripts and minGPT's Trainer run on this module.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, fields, replace
from textwrap import shorten
from typing import Any

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


UNSET: Any = None  # in GPTConfig: a number still to be given, by the caller or by model_type
Cache = list[list[Tensor]]  # [k, v] per block, each (B, T, C)
EmptyCache = list[None]  # [None] * n_layer


@dataclass
class GPTConfig:
    """Needs vocab_size, block_size, and either a model_type of SIZES or n_layer, n_head and n_embd."""

    model_type: str | None = None
    n_layer: int = UNSET
    n_head: int = UNSET
    n_embd: int = UNSET
    vocab_size: int = UNSET
    block_size: int = UNSET  # maximum context length in tokens
    embd_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    attn_pdrop: float = 0.1

    @classmethod
    def from_attributes(cls, config: Any) -> "GPTConfig":
        """Copy the settings that config, such as minGPT's CfgNode, has; the others keep their defaults."""
        settings: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        return cls(**settings)

    def complete(self) -> "GPTConfig":
        """Return a copy with every number filled in; ValueError if one is missing or contradicts model_type."""
        sizes: dict[str, Any] = {}
        if self.model_type is not None:
            if self.model_type not in SIZES:
                raise ValueError(f"model_type={self.model_type} is not one of {', '.join(SIZES)}")
            sizes = dict(zip(("n_layer", "n_head", "n_embd"), SIZES[self.model_type]))
        for name, size in sizes.items():
            if getattr(self, name) not in (None, size):
                raise ValueError(
                    f"{name}={getattr(self, name)}, but {self.model_type} has {size}; remove one of the two"
                )
        cfg = replace(self, **sizes)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size"):
            if (getattr(cfg, name) or 0) < 1:
                raise ValueError(f"{name}={getattr(cfg, name)}; pass a positive number (model_type gives the sizes)")
        return cfg


@dataclass
class Config(GPTConfig):
    """The homework's sizes for checking one attention layer or block by hand."""

    n_head: int = 3
    n_embd: int = 15
    block_size: int = 11


class NewGELU(nn.Module):
    """The tanh approximation of GELU that GPT-2 uses (Hendrycks and Gimpel 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention with a causal mask (Vaswani et al. 2017)."""

    bias: Tensor  # (1, 1, block_size, block_size), the causal mask under GPT-2's name; 1 where a query may attend

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not a multiple of n_head={config.n_head}")
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        causal_mask = torch.ones(config.block_size, config.block_size).tril()
        self.register_buffer("bias", causal_mask.view(1, 1, config.block_size, config.block_size))

    def split_heads(self, x: Tensor) -> Tensor:
        """View x (B, T, C) as (B, n_head, T, C / n_head)."""
        return x.view(x.size(0), x.size(1), self.n_head, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x (B, T, C): (B, T, C)."""
        B, T, C = x.size()
        q, k, v = (self.split_heads(y) for y in self.c_attn(x).split(self.n_embd, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    """Pre-norm transformer block: self-attention, then an MLP, each on a residual connection."""

    attention_class: type[CausalSelfAttention] = CausalSelfAttention

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = self.attention_class(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            OrderedDict[str, nn.Module](
                c_fc=nn.Linear(config.n_embd, 4 * config.n_embd),
                act=NewGELU(),
                c_proj=nn.Linear(4 * config.n_embd, config.n_embd),
                dropout=nn.Dropout(config.resid_pdrop),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.ModuleDict):
    """The parts of GPT below the output head, under minGPT's names."""

    wte: nn.Embedding  # token embeddings
    wpe: nn.Embedding  # position embeddings
    drop: nn.Dropout
    h: nn.ModuleList  # blocks
    ln_f: nn.LayerNorm


class GPT(nn.Module):
    """minGPT: recomputes the whole context for every generated token.

    config is a GPTConfig or any object with its attributes, such as minGPT's CfgNode. As in minGPT, the sizes that its
    model_type stands for are written into it.
    """

    block_class: type[Block] = Block

    def __init__(self, config: Any):
        super().__init__()
        given, config = config, GPTConfig.from_attributes(config).complete()
        given.n_layer, given.n_head, given.n_embd = config.n_layer, config.n_head, config.n_embd
        self.config = config
        self.block_size, self.n_layer = config.block_size, config.n_layer
        self.transformer = Transformer({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.embd_pdrop),
            "h": nn.ModuleList(self.block_class(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        for name, p in self.named_parameters():  # layer norms keep PyTorch's ones and zeros
            if name.endswith("c_proj.weight"):  # GPT-2 scales residual projections down with depth
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @staticmethod
    def get_default_config() -> GPTConfig:
        """Return a config to fill in by assigning attributes: vocab_size, block_size, and model_type or the sizes."""
        return GPTConfig()

    @classmethod
    def from_pretrained(cls, folder_or_name: str) -> "GPT":
        """Load GPT-2 weights from a folder or the Hugging Face Hub ("gpt2-xl"), as float32 and in eval mode.

        Raises ValueError if the checkpoint is not a GPT-2 that this class computes exactly.
        """
        from models.formats.gpt2 import read_gpt2

        settings, state = read_gpt2(folder_or_name)
        config = GPTConfig(**settings).complete()
        mask = torch.ones(1, 1, config.block_size, config.block_size).tril()
        state |= {f"transformer.h.{i}.attn.bias": mask for i in range(config.n_layer)}
        with torch.device("meta"):  # the initial weights are replaced, so do not allocate them
            model = cls(config)
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:  # the message lists missing, unexpected and mis-shaped tensors
            raise ValueError(f"{folder_or_name}: {shorten(str(error), 300)}") from None
        return model.eval()

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """Token plus position embeddings of idx[:, start:], idx (B, T): (B, T - start, C)."""
        T = idx.size(1)
        if not 0 < T <= self.block_size:
            raise ValueError(f"idx holds {T} tokens, but block_size={self.block_size}; pass 1 to {self.block_size}")
        pos = torch.arange(start, T, dtype=torch.long, device=idx.device)
        return self.transformer.drop(self.transformer.wte(idx[:, start:]) + self.transformer.wpe(pos))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, T, vocab_size) for idx (B, T), and the mean loss if targets (B, T) are given.

        A target of -1 is ignored.
        """
        x = self.embed(idx)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, cross_entropy(logits, targets)

    def configure_optimizers(self, train_config: Any) -> torch.optim.AdamW:
        """AdamW with train_config's learning_rate, betas and weight_decay, as minGPT's Trainer asks for it.

        Only the weights of linear layers decay, not biases, embeddings and layer norms (minGPT, after GPT-2).
        """
        no_decay = {p for module in self.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        no_decay |= {p for p in self.parameters() if p.dim() < 2}
        groups = [
            {"params": [p for p in self.parameters() if p not in no_decay], "weight_decay": train_config.weight_decay},
            {"params": [p for p in self.parameters() if p in no_decay], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=train_config.learning_rate, betas=train_config.betas)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        do_sample: bool = False,
        top_k: int | None = None,
    ) -> Tensor:
        """Continue idx (B, T) by max_new_tokens tokens, each from the last block_size tokens: (B, T + max_new_tokens).

        Takes the most likely token, or samples from the top_k most likely if do_sample is set.
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[0]
            idx = torch.cat((idx, next_token(logits[:, -1], temperature, do_sample, top_k)), dim=1)
        return idx


def cross_entropy(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    """Mean loss of logits (B, T, vocab_size) against targets (B, T), -1 ignored; None without targets."""
    return None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def next_token(logits: Tensor, temperature: float, do_sample: bool, top_k: int | None) -> Tensor:
    """Map logits (B, vocab_size) to ids (B, 1): the most likely token, or a sample from the top_k most likely."""
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; do_sample=False takes the most likely token")
    logits = logits / temperature
    if top_k is not None:
        if top_k < 1:
            raise ValueError(f"top_k={top_k} must be 1 or more, or None for all")
        threshold = torch.topk(logits, min(top_k, logits.size(-1))).values[:, [-1]]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    probs = F.softmax(logits, dim=-1)
    return torch.multinomial(probs, num_samples=1) if do_sample else torch.topk(probs, k=1, dim=-1).indices


class KVBuffer:
    """Preallocated keys and values of one block, k and v (B, capacity, C) each; the first `length` tokens are in use.

    In memory the time dimension is innermost: decoding one token reads each channel over all tokens, contiguously.
    """

    def __init__(self, k: Tensor, v: Tensor, capacity: int):
        self.k, self.v = (t.new_empty(t.size(0), t.size(2), capacity).transpose(1, 2) for t in (k, v))
        self.length = 0
        self.append(k, v)

    def append(self, k: Tensor, v: Tensor) -> "KVView":
        """Write k and v (B, T_new, C) behind the tokens in use; returns a view of all of them."""
        start, self.length = self.length, self.length + k.size(1)
        self.k[:, start : self.length] = k
        self.v[:, start : self.length] = v
        return KVView(self)


class KVView(list):
    """A cache [k, v], each (B, T, C), whose tensors are views of a buffer's first T tokens."""

    def __init__(self, buffer: KVBuffer):
        self.buffer = buffer
        self.views = buffer.k[:, : buffer.length], buffer.v[:, : buffer.length]
        super().__init__(self.views)

    def can_append(self, n: int) -> bool:
        """Whether n tokens can be written in place: the buffer has space, and no other cache has taken it."""
        (k, v), buffer = self.views, self.buffer
        unmodified = self[0] is k and self[1] is v  # a caller may have replaced the list's items
        writable = torch.is_inference_mode_enabled() or not buffer.k.is_inference()
        return unmodified and writable and k.size(1) == buffer.length <= buffer.k.size(1) - n


def append_kv(kv_cache: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """Return kv_cache extended by k and v (B, T_new, C); the given cache keeps its value and can be continued again.

    Tokens are written in place where the buffer has space behind this cache. Otherwise, also when another
    continuation has used that space, the history is copied to a buffer of twice the length.
    """
    if torch.is_grad_enabled():  # autograd needs tensors that are never written again
        return [torch.cat([kv_cache[0], k], dim=1), torch.cat([kv_cache[1], v], dim=1)]
    if isinstance(kv_cache, KVView) and kv_cache.can_append(k.size(1)):
        return kv_cache.buffer.append(k, v)
    past_k, past_v = kv_cache
    return KVBuffer(past_k, past_v, capacity=2 * (past_k.size(1) + k.size(1))).append(k, v)


class CausalSelfAttention_kv(CausalSelfAttention):
    """CausalSelfAttention that takes and returns a cache of keys and values."""

    def forward(  # type: ignore[override]  # returns the cache beside the output
        self, x: Tensor, kv_cache: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Attend from x (B, T, C) to the cached tokens and x; kv_cache is [k, v], each (B, T_past, C).

        Returns the output (B, T, C) and the cache of T_past + T tokens.
        """
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        kv_cache = [k, v] if kv_cache is None else append_kv(kv_cache, k, v)
        k, v = kv_cache
        S = k.size(1)
        if T == 1:
            q = self.split_heads(q * (1.0 / math.sqrt(C // self.n_head)))
            y = self.attn_dropout(F.softmax(q @ self.split_heads(k).transpose(-2, -1), dim=-1)) @ self.split_heads(v)
        else:  # SDPA aligns is_causal to the top left, which is wrong when there is a past
            mask = self.bias[:, :, S - T : S, :S] == 1 if S > T else None
            p = self.attn_dropout.p if self.training else 0.0
            q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y)), kv_cache


class Block_kv(Block):
    """Block that passes a cache of keys and values through its attention."""

    attention_class = CausalSelfAttention_kv

    def forward(  # type: ignore[override]  # returns the cache beside the output
        self, x: Tensor, kv_cache: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        y, kv_cache = self.attn(self.ln_1(x), kv_cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), kv_cache


class GPT_kv(GPT):
    """GPT with a key/value cache: computes each token once."""

    block_class = Block_kv

    def hidden_states(
        self, idx: Tensor, kv_cache: Cache | EmptyCache | None = None, compute_first: bool = False
    ) -> tuple[Tensor, Cache]:
        """Compute the tokens of idx (B, T) that kv_cache lacks: hidden states (B, T_new, C) and the cache of all T.

        kv_cache holds one [k, v] per block; None or [None] * n_layer is an empty cache. compute_first ignores it and
        computes the whole sequence.
        """
        cached = None if compute_first else self._check_cache(idx, kv_cache)
        x = self.embed(idx, cached[0][0].size(1) if cached else 0)
        new_cache = []
        for i, block in enumerate(self.transformer.h):
            x, block_cache = block(x, cached[i] if cached else None)
            new_cache.append(block_cache)
        return self.transformer.ln_f(x), new_cache

    def _check_cache(self, idx: Tensor, kv_cache: Cache | EmptyCache | None) -> Cache | None:
        """Return kv_cache, None if it is empty; ValueError if it does not belong to a proper prefix of idx (B, T)."""
        if kv_cache is None:
            return None
        if len(kv_cache) != self.n_layer:
            raise ValueError(
                f"kv_cache has {len(kv_cache)} blocks, but the model {self.n_layer}; [None] * n_layer is an empty cache"
            )
        filled = [block for block in kv_cache if block is not None]
        if not filled:
            return None
        if len(filled) < self.n_layer:
            raise ValueError(f"kv_cache is empty for some of {self.n_layer} blocks only; fill all of them or none")
        B, past, _ = filled[0][0].shape
        if len(idx) != B or idx.size(1) <= past:
            raise ValueError(
                f"idx is {tuple(idx.shape)}, but the cache holds {(B, past)} tokens; "
                "pass the whole sequence, at least one token longer than the cache"
            )
        return filled

    def forward(  # type: ignore[override]  # returns the cache beside logits and loss when one is given
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        kv_cache: Cache | EmptyCache | None = None,
        compute_first: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Cache]:
        """Return logits (B, T_new, vocab_size) of the new tokens and their loss given targets (B, T).

        idx (B, T) is the whole sequence. Without kv_cache all of it is computed. With one, [k, v] per block, only the
        tokens that it lacks are, and the new cache is returned, too; [None] * n_layer is an empty cache to begin
        with, and compute_first ignores what the cache holds. The given cache is not changed and can be continued again.
        """
        x, new_cache = self.hidden_states(idx, kv_cache, compute_first)
        logits = self.lm_head(x)
        loss = cross_entropy(logits, None if targets is None else targets[:, -x.size(1) :])
        return (logits, loss) if kv_cache is None else (logits, loss, new_cache)

    @torch.no_grad()
    def generate_kv(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        do_sample: bool = False,
        top_k: int | None = None,
    ) -> Tensor:
        """Return what `generate` returns, but compute each token once as long as block_size tokens suffice."""
        kv_cache: Cache | None = None
        for _ in range(max_new_tokens):
            shifted = idx.size(1) > self.block_size  # every token's position changes, so cached keys are wrong
            x, kv_cache = self.hidden_states(idx[:, -self.block_size :], kv_cache, compute_first=shifted)
            logits = self.lm_head(x[:, -1])  # also after the prompt only the last position is needed
            idx = torch.cat((idx, next_token(logits, temperature, do_sample, top_k)), dim=1)
        return idx
