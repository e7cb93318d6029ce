"""An encoder-decoder captioner: nanoVLM's vision transformer, and Whisper's text decoder with cross-attention.

Architecture and parameter names of the decoder are those of openai/whisper's model.py (Radford et al. 2022), whose
decoder weights load unchanged. The keys and values of cross-attention are computed once per image and shared by all
tokens and by all sequences about that image.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention
from models.cache import KVCache
from models.config import VLMConfig
from models.decoding import GREEDY, SamplingParams, TokenSampler, collect_tokens, generate_tokens, validate_counts
from models.errors import InputError
from models.vision_transformer import VisionTransformer

KVPair = tuple[Tensor, Tensor]  # keys and values, each (B, n_head, S, D)
Step = Callable[[Tensor], Tensor]  # ids (B,) to the next logits (B, vocabulary)


@dataclass(frozen=True)
class TextPrefillState:
    """Cached keys and values, one entry per block; a value that can be continued many times."""

    cross_kv: list[KVPair]  # of N images, computed once
    self_kv: list[KVCache] | None = None  # of B = N * n sequences; the n sequences of an image are adjacent

    @property
    def length(self) -> int:
        """Number of tokens cached."""
        return self.self_kv[0].length if self.self_kv else 0

    def rows(self, index: Tensor) -> "TextPrefillState":
        """Select sequences by index (B_new,), as beam search does; each must stay with its image.

        The keys and values of the images are shared, not copied.
        """
        return TextPrefillState(self.cross_kv, [kv.rows(index) for kv in self.self_kv or []])


class MultiHeadAttention(nn.Module):
    """Whisper's attention. It knows no cache: keys and values are arguments of `attend`."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
        """Causal self-attention of x (B, T, C), or cross-attention to xa (N, S, C) where N divides B."""
        k, v = self.project_kv(x if xa is None else xa)
        return self.attend(x, k, v, causal_mask(x.size(1), k.size(2), x.device) if xa is None else None)

    def project_kv(self, xa: Tensor) -> KVPair:
        """Keys and values of xa (N, S, C), each (N, n_head, S, D)."""
        k, v = self.key(xa), self.value(xa)
        return k.unflatten(-1, (self.n_head, -1)).transpose(1, 2), v.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from x (B, T, C) to given k and v; mask (1, 1, T, S) bool is True where a query may attend."""
        q = self.query(x).unflatten(-1, (self.n_head, -1))
        # fold the sequences that share an image into the time dimension, so its keys are not repeated for each
        q = q.reshape(k.size(0), -1, *q.shape[2:]).transpose(1, 2)
        return self.out(attention(q, k, v, mask).transpose(1, 2).reshape(x.shape))


def causal_mask(n_new: int, n_keys: int, device: torch.device) -> Tensor | None:
    """Causal mask of the last n_new of n_keys tokens, (1, 1, n_new, n_keys) bool; None where all keys are visible."""
    if n_new == 1:
        return None
    return torch.ones(1, 1, n_new, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_new)


class Block(nn.Module):
    """Pre-norm block: self-attention, cross-attention and an MLP."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head)
        self.cross_attn_ln = nn.LayerNorm(n_state)
        self.mlp = nn.Sequential(nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x: Tensor, xa: Tensor) -> Tensor:
        x = x + self.attn(self.attn_ln(x))
        x = x + self.cross_attn(self.cross_attn_ln(x), xa)
        return x + self.mlp(self.mlp_ln(x))

    def forward_cached(
        self, x: Tensor, cross_kv: KVPair, self_kv: KVCache | None, mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Compute x (B, T, C) with given keys and values of the image, behind the cached tokens self_kv."""
        y = self.attn_ln(x)
        k, v = self.attn.project_kv(y)
        self_kv = KVCache(k, v) if self_kv is None else self_kv.append(k, v)
        x = x + self.attn.attend(y, self_kv.key, self_kv.value, mask)
        x = x + self.cross_attn.attend(self.cross_attn_ln(x), *cross_kv)
        return x + self.mlp(self.mlp_ln(x)), self_kv


class TextDecoder(nn.Module):
    """Whisper's decoder: learned positions, pre-norm blocks, the output head tied to the token embedding."""

    blocks: list[Block]  # an nn.ModuleList, typed by its elements

    def __init__(self, n_vocab: int, n_ctx: int, n_state: int, n_head: int, n_layer: int):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(n_ctx, n_state))
        self.blocks = cast(list[Block], nn.ModuleList(Block(n_state, n_head) for _ in range(n_layer)))
        self.ln = nn.LayerNorm(n_state)
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, x: Tensor, xa: Tensor, start_pos: int = 0) -> Tensor:
        """Logits (B, T, n_vocab) float32 of ids x (B, T) at positions start_pos, start_pos + 1, ...

        xa (N, S, n_state) are the encoded images or recordings.
        """
        x = self.embed(x, self.positions(start_pos, x.size(1)))
        for block in self.blocks:
            x = block(x, xa)
        return self.logits(x)

    def project_cross_kv(self, xa: Tensor) -> list[KVPair]:
        """Each block's cross-attention keys and values of the encoded images xa (N, S, n_state)."""
        return [block.cross_attn.project_kv(xa) for block in self.blocks]

    def forward_cached(self, x: Tensor, state: TextPrefillState) -> tuple[Tensor, TextPrefillState]:
        """Continue state by ids x (B, T): hidden states (B, T, C), which `logits` takes, and the extended state."""
        past, T = state.length, x.size(1)
        x = self.embed(x, self.positions(past, T))
        x, self_kv = self.run_blocks(x, state.cross_kv, state.self_kv, causal_mask(T, past + T, x.device))
        return x, TextPrefillState(state.cross_kv, self_kv)

    def run_blocks(
        self, x: Tensor, cross_kv: list[KVPair], self_kv: Sequence[KVCache] | None, mask: Tensor | None
    ) -> tuple[Tensor, list[KVCache]]:
        """Run embeddings x (B, T, C) through all blocks: hidden states and the extended caches, one per block."""
        extended = []
        for i, block in enumerate(self.blocks):
            x, kv = block.forward_cached(x, cross_kv[i], self_kv[i] if self_kv else None, mask)
            extended.append(kv)
        return x, extended

    def positions(self, start: int, n: int) -> Tensor:
        """Positions start ... start + n - 1, (n,) int64; InputError beyond n_ctx."""
        n_ctx = len(self.positional_embedding)
        if start + n > n_ctx:
            raise InputError(f"{start + n} tokens exceed the decoder's n_ctx={n_ctx}; shorten the prompt or the answer")
        return torch.arange(start, start + n, device=self.positional_embedding.device)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token plus position embeddings of ids (B, T) at positions (T,): (B, T, C)."""
        return self.token_embedding(ids) + self.positional_embedding[positions]

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (..., C) to float32 logits (..., n_vocab)."""
        return F.linear(self.ln(x), self.token_embedding.weight).float()


class Seq2SeqModel(nn.Module, ABC):
    """Generation by an encoder and a decoder that reads what it encodes through cross-attention."""

    decoder: TextDecoder

    @abstractmethod
    def encode(self, inputs: Tensor) -> Tensor:
        """Encode N inputs, images or audio, to what the decoder attends to, (N, S, C)."""

    def prefill(self, input_ids: Tensor, inputs: Tensor) -> tuple[Tensor, TextPrefillState]:
        """Encode N inputs and a prompt, ids (N * n, T): logits (N * n, vocabulary) and the state."""
        return self._next_logits(input_ids, TextPrefillState(self.decoder.project_cross_kv(self.encode(inputs))))

    def decode(self, ids: Tensor, state: TextPrefillState) -> tuple[Tensor, TextPrefillState]:
        """Compute one more token per sequence, ids (B,): logits (B, vocabulary) and the extended state."""
        return self._next_logits(ids[:, None], state)

    def _next_logits(self, ids: Tensor, state: TextPrefillState) -> tuple[Tensor, TextPrefillState]:
        x, state = self.decoder.forward_cached(ids, state)
        return self.decoder.logits(x[:, -1]), state

    @torch.inference_mode()
    def stream(
        self,
        input_ids: Tensor,
        inputs: Tensor,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        eos_token_id: int | None = None,
        n_samples: int = 1,
        use_kv_cache: bool = True,
    ) -> Iterator[Tensor]:
        """Yield ids (N * n_samples,) token by token, for prompts of equal length, ids (N, T), one per input."""
        validate_counts(max_new_tokens, n_samples)
        self.decoder.positions(0, input_ids.size(1) + max(0, max_new_tokens - 1))  # raises if they are too many
        if max_new_tokens == 0:
            return
        rows = torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(n_samples)
        run = self._cached_steps if use_kv_cache else self._uncached_steps
        logits, step = run(input_ids, inputs, rows)
        yield from generate_tokens(logits, step, TokenSampler(sampling, eos_token_id, input_ids[rows]), max_new_tokens)

    def _cached_steps(self, input_ids: Tensor, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Step]:
        """Logits after the prompt, and the step from new ids to the next logits, which computes only the new ids."""
        logits, state = self.prefill(input_ids, inputs)
        if len(rows) > len(input_ids):
            logits, state = logits[rows], state.rows(rows)

        def step(ids: Tensor) -> Tensor:
            nonlocal state
            logits, state = self.decode(ids, state)
            return logits

        return logits, step

    def _uncached_steps(self, input_ids: Tensor, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Step]:
        """The same, with a step that computes the whole sequence again."""
        x, xa = input_ids[rows], self.encode(inputs)

        def step(ids: Tensor) -> Tensor:
            nonlocal x
            x = torch.cat([x, ids[:, None]], dim=1)
            return self.decoder(x, xa)[:, -1]

        return self.decoder(x, xa)[:, -1], step

    def generate(self, input_ids: Tensor, inputs: Tensor, **kwargs) -> Tensor:
        """Return all tokens that `stream` yields, (N * n_samples, T_new)."""
        n_rows = len(input_ids) * kwargs.get("n_samples", 1)
        return collect_tokens(self.stream(input_ids, inputs, **kwargs), n_rows, input_ids)


class EncoderDecoder(Seq2SeqModel):
    """An encoder-decoder captioner of the sizes in a VLMConfig: vit_* for the encoder, lm_* for the decoder."""

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.cfg = cfg
        self.vision_encoder = VisionTransformer(cfg)
        nn.init.normal_(self.vision_encoder.patch_embedding.position_embedding, std=0.02)
        self.vision_proj = nn.Linear(cfg.vit_hidden_dim, cfg.lm_hidden_dim, bias=False)
        self.decoder = TextDecoder(
            cfg.lm_vocab_size, cfg.lm_max_position_embeddings, cfg.lm_hidden_dim, cfg.lm_n_heads, cfg.lm_n_blocks
        )

    def encode(self, inputs: Tensor) -> Tensor:
        """Encode images (N, 3, S, S) to what the decoder attends to, (N, patches, C)."""
        return self.vision_proj(self.vision_encoder(inputs))

    def forward(self, input_ids: Tensor, images: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, T, vocabulary), and the mean loss if targets (B, T) are given; -100 is ignored."""
        logits = self.decoder(input_ids, self.encode(images))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
