"""An encoder-decoder captioner: nanoVLM's vision transformer, and Whisper's text decoder with cross-attention.

The keys and values of cross-attention are computed once per image and shared by all tokens and by all sequences about
that image.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.common.options import GREEDY, SamplingParams
from models.config import VLMConfig
from models.decoding import TokenSampler, collect_tokens, generate_tokens, validate_counts
from models.kv_study.text_decoder import TextDecoder, TextPrefillState
from models.vision_transformer import VisionTransformer


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
        seen = input_ids[rows]
        sampler = TokenSampler(sampling, eos_token_id, seen)
        if use_kv_cache:
            logits, state = self.prefill(input_ids, inputs)
            logits = logits[rows]
            state = state.rows(rows)
        else:
            xa = self.encode(inputs)
            logits = self.decoder(seen, xa)[:, -1]

        def step(ids: Tensor) -> Tensor:
            nonlocal state, seen
            if use_kv_cache:
                logits, state = self.decode(ids, state)
                return logits
            seen = torch.cat([seen, ids[:, None]], dim=1)
            return self.decoder(seen, xa)[:, -1]

        yield from generate_tokens(logits, step, sampler, max_new_tokens)

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
