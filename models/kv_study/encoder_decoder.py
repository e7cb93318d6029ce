"""The other road from picture to words: Whisper's text decoder looks at our ViT's patches by cross-attention.

Architecture and names are those of openai/whisper's model.py (Radford et al. 2022), whose decoder weights load as
they are. A picture's cross keys and values are made once, however many words and beams look at them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention
from models.cache import KVCache
from models.config import VLMConfig
from models.decoding import GREEDY, SamplingParams, check_counts, generate_tokens, token_presence_mask
from models.vision_transformer import VisionTransformer

KeysValues = tuple[Tensor, Tensor]  # each (B, n_head, S, D)


@dataclass(frozen=True)
class TextPrefillState:
    """What a decode has read: of the picture, made once, and of the words so far; one entry per block."""

    cross: list[KeysValues]  # of N pictures
    kv_cache: list[KVCache] | None = None  # of B = N * n rows of words; the n that tell a picture are neighbours

    @property
    def length(self) -> int:
        """Words read so far."""
        return self.kv_cache[0].length if self.kv_cache else 0

    def rows(self, index: Tensor) -> "TextPrefillState":
        """The chosen rows of words, index (B_new,), which must stay with their picture: beams, reordered or split.

        Pictures are not copied.
        """
        return TextPrefillState(self.cross, [kv.rows(index) for kv in self.kv_cache or []])


class MultiHeadAttention(nn.Module):
    """Knows nothing of caches: it is given keys and values, or makes them."""

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
        """Let x (B, T, C) look at itself and what stands before, or at all of xa (N, S, C), N dividing B."""
        k, v = self.keys_values(x if xa is None else xa)
        return self.look_up(x, k, v, causal(x.size(1), k.size(2), x.device) if xa is None else None)

    def keys_values(self, xa: Tensor) -> KeysValues:
        k, v = self.key(xa), self.value(xa)
        return k.unflatten(-1, (self.n_head, -1)).transpose(1, 2), v.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def look_up(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask (1, 1, T, S) bool, True where x may look."""
        q = self.query(x).unflatten(-1, (self.n_head, -1))
        # rows that share a picture queue up as if they were time, so its keys are read once and never copied
        q = q.reshape(k.size(0), -1, *q.shape[2:]).transpose(1, 2)
        return self.out(attention(q, k, v, mask).transpose(1, 2).reshape(x.shape))


def causal(n_new: int, n_keys: int, device: torch.device) -> Tensor | None:
    """Which of n_keys the last n_new may see, (1, 1, n_new, n_keys) bool; None where one may see all."""
    return None if n_new == 1 else torch.ones(1, 1, n_new, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_new)


class Block(nn.Module):
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

    def read(
        self, x: Tensor, cross: KeysValues, block_kv_cache: KVCache | None, mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """The same, with the picture's keys and values given and the words' continued."""
        words = self.attn_ln(x)
        k, v = self.attn.keys_values(words)
        kv = KVCache(k, v) if block_kv_cache is None else block_kv_cache.append(k, v)
        x = x + self.attn.look_up(words, kv.key, kv.value, mask)
        x = x + self.cross_attn.look_up(self.cross_attn_ln(x), *cross)
        return x + self.mlp(self.mlp_ln(x)), kv


class TextDecoder(nn.Module):
    """Learned positions, pre-norm blocks, the output tied to the embedding."""

    def __init__(self, n_vocab: int, n_ctx: int, n_state: int, n_head: int, n_layer: int):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(n_ctx, n_state))
        self.blocks = nn.ModuleList(Block(n_state, n_head) for _ in range(n_layer))
        self.ln = nn.LayerNorm(n_state)
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, x: Tensor, xa: Tensor, start_pos: int = 0) -> Tensor:
        """Logits (B, T, n_vocab) float32 of ids x (B, T) at positions from start_pos on, about xa (N, S, n_state)."""
        x = self.embed(x, self.places(start_pos, x.size(1)))
        for block in self.blocks:
            x = block(x, xa)
        return self.logits(x)

    def cross(self, xa: Tensor) -> list[KeysValues]:
        """Each block's keys and values of what is told, xa (N, S, n_state)."""
        return [block.cross_attn.keys_values(xa) for block in self.blocks]

    def read(self, x: Tensor, prefix: TextPrefillState) -> tuple[Tensor, TextPrefillState]:
        """Continue prefix with ids x (B, T): hidden states (B, T, C), which `logits` takes, and the longer prefix."""
        past, T = prefix.length, x.size(1)
        x = self.embed(x, self.places(past, T))
        x, kv_cache = self.through(x, prefix.cross, prefix.kv_cache, causal(T, past + T, x.device))
        return x, TextPrefillState(prefix.cross, kv_cache)

    def through(self, x, cross, kv_cache, mask):
        """Embeddings x (B, T, C) through all blocks, with each one's cross keys and cache: x and the longer caches."""
        longer = []
        for i, block in enumerate(self.blocks):
            x, kv = block.read(x, cross[i], kv_cache[i] if kv_cache else None, mask)
            longer.append(kv)
        return x, longer

    def places(self, start: int, n: int) -> Tensor:
        if start + n > (limit := len(self.positional_embedding)):
            raise ValueError(f"{start + n} tokens exceed the decoder's n_ctx={limit}; shorten the prompt or the answer")
        return torch.arange(start, start + n, device=self.positional_embedding.device)

    def embed(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.token_embedding(ids) + self.positional_embedding[places]

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.ln(x), self.token_embedding.weight).float()


class EncoderDecoder(nn.Module):
    """A captioner of a VLMConfig's measures: vit_* for the encoder; vocabulary, width, heads and depth from lm_*."""

    def __init__(self, cfg: VLMConfig):
        super().__init__()
        self.cfg = cfg
        self.vision_encoder = VisionTransformer(cfg)
        nn.init.normal_(self.vision_encoder.patch_embedding.position_embedding, std=0.02)
        self.bridge = nn.Linear(cfg.vit_hidden_dim, cfg.lm_hidden_dim, bias=False)
        self.decoder = TextDecoder(
            cfg.lm_vocab_size, cfg.lm_max_position_embeddings, cfg.lm_hidden_dim, cfg.lm_n_heads, cfg.lm_n_blocks
        )

    def encode(self, images: Tensor) -> Tensor:
        """Images (N, 3, S, S), one a picture, to what the decoder looks at, (N, patches, C)."""
        return self.bridge(self.vision_encoder(images))

    def forward(self, input_ids: Tensor, images: Tensor, targets: Tensor | None = None):
        """Logits (B, T, vocabulary) and, given targets (B, T) with -100 where nothing is asked, their loss."""
        logits = self.decoder(input_ids, self.encode(images))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def prefill(self, input_ids: Tensor, images: Tensor) -> tuple[Tensor, TextPrefillState]:
        """Look at images (N, 3, S, S) and read a prompt, ids (N * n, T): last logits and the prefix."""
        return self._read(input_ids, TextPrefillState(self.decoder.cross(self.encode(images))))

    def decode(self, ids: Tensor, prefix: TextPrefillState) -> tuple[Tensor, TextPrefillState]:
        """Read one more token per row, ids (B,)."""
        return self._read(ids[:, None], prefix)

    def _read(self, ids: Tensor, prefix: TextPrefillState) -> tuple[Tensor, TextPrefillState]:
        x, prefix = self.decoder.read(ids, prefix)
        return self.decoder.logits(x[:, -1]), prefix

    @torch.inference_mode()
    def stream(
        self,
        input_ids: Tensor,
        images: Tensor,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        eos_token_id: int | None = None,
        n_samples: int = 1,
        use_kv_cache: bool = True,
    ) -> Iterator[Tensor]:
        """Yield ids (N * n_samples,) as they are chosen, for prompts of equal length, ids (N, T), one a picture."""
        check_counts(max_new_tokens, n_samples)
        self.decoder.places(0, input_ids.size(1) + max(0, max_new_tokens - 1))  # room for all, or ValueError now
        if max_new_tokens == 0:
            return
        rows = torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(n_samples)
        if use_kv_cache:
            logits, prefix = self.prefill(input_ids, images)
            if n_samples > 1:
                logits, prefix = logits[rows], prefix.rows(rows)

            def step(ids: Tensor) -> Tensor:
                nonlocal prefix
                logits, prefix = self.decode(ids, prefix)
                return logits
        else:
            x, xa = input_ids[rows], self.encode(images)
            logits = self.decoder(x, xa)[:, -1]

            def step(ids: Tensor) -> Tensor:
                nonlocal x
                x = torch.cat([x, ids[:, None]], dim=1)
                return self.decoder(x, xa)[:, -1]

        seen = None if sampling.repetition_penalty == 1 else token_presence_mask(input_ids, logits.size(-1))[rows]
        yield from generate_tokens(
            logits, step, sampling=sampling, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, seen=seen
        )

    def generate(self, input_ids: Tensor, images: Tensor, **kwargs) -> Tensor:
        """All that `stream` yields, (N * n_samples, T_new)."""
        columns = list(self.stream(input_ids, images, **kwargs))
        if not columns:
            return input_ids.new_empty(len(input_ids) * kwargs.get("n_samples", 1), 0)
        return torch.stack(columns, dim=1)
