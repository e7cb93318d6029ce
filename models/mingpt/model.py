"""minGPT without a cache: Karpathy's GPT (github.com/karpathy/minGPT, names included), after Radford et al. 2019."""

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.mingpt.config import GPTConfig


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
        self.n_head = config.n_head
        self.n_embd = config.n_embd
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
        given = config
        config = GPTConfig.complete(config)
        given.n_layer = config.n_layer
        given.n_head = config.n_head
        given.n_embd = config.n_embd
        self.config = config
        self.block_size = config.block_size
        self.n_layer = config.n_layer
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
        """Load GPT-2 from a folder or the Hub ("gpt2-xl"), in float32 and eval mode; ValueError for a variant of it."""
        from models.mingpt.gpt2 import find_gpt2, read_gpt2  # here, as a new model needs no files

        folder, settings = find_gpt2(folder_or_name)
        with torch.device("meta"):  # the initial weights are replaced, so do not allocate them
            model = cls(GPTConfig(**settings))
        state = read_gpt2(folder, model.state_dict())
        mask = torch.ones(1, 1, model.block_size, model.block_size).tril()
        state |= {f"transformer.h.{i}.attn.bias": mask for i in range(model.n_layer)}
        model.load_state_dict(state, assign=True)
        return model.eval()

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """Token plus position embeddings of idx[:, start:], idx (B, T): (B, T - start, C)."""
        T = idx.size(1)
        if not 0 < T <= self.block_size:
            raise ValueError(f"idx holds {T} tokens, but block_size={self.block_size}; pass 1 to {self.block_size}")
        pos = torch.arange(start, T, dtype=torch.long, device=idx.device)
        return self.transformer.drop(self.transformer.wte(idx[:, start:]) + self.transformer.wpe(pos))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, T, vocab_size) for idx (B, T), and the mean loss given targets (B, T), -1 ignored."""
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
