"""Picture in, words out: vision encoder, projector and language model on one sequence of embeddings."""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import KVCache
from models.config import VLMConfig
from models.decoding import GREEDY, SamplingParams, collect_tokens, stream_tokens
from models.errors import InputError
from models.language_model import LanguageModel
from models.modality_projector import ModalityProjector
from models.vision_transformer import PatchEmbedding, VisionTransformer


@dataclass(frozen=True)
class PrefillState:
    """A sequence read so far: what attention remembers of it, and which of its places are padding."""

    kv_cache: list[KVCache]  # one per block
    attention_mask: Tensor | None = None  # (B, length); None when nothing is padding

    @property
    def length(self) -> int:
        return self.kv_cache[0].length

    def first(self, n: int) -> "PrefillState":
        """The sequence up to its n-th token."""
        if n == self.length:
            return self
        mask = None if self.attention_mask is None else self.attention_mask[:, :n]
        return PrefillState([kv.first(n) for kv in self.kv_cache], mask)

    def rows(self, index: Tensor) -> "PrefillState":
        """The chosen rows, index (B_new,), in that order and as often as named; a copy."""
        mask = None if self.attention_mask is None else self.attention_mask[index]
        return PrefillState([kv.rows(index) for kv in self.kv_cache], mask)


class VisionLanguageModel(nn.Module):
    """SigLIP's encoder, a pixel-shuffle projector and a Llama-shaped decoder, as nanoVLM joins them.

    image_token_id marks the places of images in a prompt; -1, where the vocabulary has no token for them.
    """

    def __init__(self, cfg: VLMConfig, image_token_id: int):
        super().__init__()
        if cfg.lm_use_tokens:
            raise InputError("lm_use_tokens=true makes the decoder read ids; with pictures it must read embeddings")
        if not -1 <= image_token_id < cfg.lm_vocab_size:
            raise InputError(f"image_token_id={image_token_id} is outside lm_vocab_size={cfg.lm_vocab_size}")
        self.cfg, self.image_token_id = cfg, image_token_id
        self.vision_encoder = VisionTransformer(cfg)
        self.MP = ModalityProjector(cfg)
        self.decoder = LanguageModel(cfg)
        if self.device.type != "meta":  # where there is nothing to initialise, and torch would import its compiler to
            self.apply(init_weights)
            nn.init.normal_(self.decoder.head.weight, std=0.02)  # like the embedding, which it may be

    @classmethod
    def from_backbones(cls, vision: str | PathLike, language: str | PathLike, **options) -> "VisionLanguageModel":
        """A new model of a pretrained SigLIP and a pretrained Llama: see `models.convert.backbones.from_backbones`."""
        from models.convert.backbones import from_backbones  # which imports this module

        return from_backbones(vision, language, **options)

    @property
    def device(self) -> torch.device:
        return self.MP.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.MP.proj.weight.dtype

    def embed(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T); images (N, 3, S, S) take the image tokens' places in reading order."""
        self.validate_images(input_ids, images)
        places = input_ids == self.image_token_id
        x = self.decoder.token_embedding(input_ids.masked_fill(places, 0))  # 0 is any id: images replace it
        if images is None or not len(images):
            return x
        pictures = self.MP(self.vision_encoder(images.to(self.dtype)))
        return x.masked_scatter(places[..., None], pictures.to(x.dtype))

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, C) of ids (B, T), an image token's id being an ordinary one."""
        return self.decoder.token_embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, vocabulary) and, given targets, their mean cross-entropy; for training, keeps no cache.

        targets (B, T) holds at each place the id that should follow it, -100 where nothing is asked.
        """
        hidden, _ = self.decoder(self.embed(input_ids, images), attention_mask, use_cache=False)
        logits = self.decoder.head(hidden)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)

    def prefill(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        prefix: PrefillState | None = None,
    ) -> tuple[Tensor, PrefillState]:
        """Read a prompt, ids (B, T), or continue a prefix with it: last logits (B, vocabulary) and the new prefix.

        attention_mask (B, T) is 0 at padding, which stands on the left. The prefix given can be used again.
        """
        if attention_mask is not None and bool((attention_mask == 1).all()):
            attention_mask = None
        return self.prefill_embeds(self.embed(input_ids, images), attention_mask, prefix)

    def decode(self, ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        """Append one token per row, ids (B,): next logits (B, vocabulary) and the longer prefix."""
        return self.prefill_embeds(self.embed_tokens(ids[:, None]), None, prefix)

    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None = None, prefix: PrefillState | None = None
    ) -> tuple[Tensor, PrefillState]:
        """`prefill` of embeddings (B, T, C); attention_mask (B, T) covers these alone."""
        mask, kv_cache, start_pos = attention_mask, None, 0
        if prefix is not None:
            kv_cache, start_pos = prefix.kv_cache, prefix.length
        past = None if prefix is None else prefix.attention_mask
        if past is not None or mask is not None:
            parts = ((past, start_pos), (mask, embeds.size(1)))
            ones = embeds.new_ones(1, dtype=torch.long)
            mask = torch.cat([ones.expand(len(embeds), n) if part is None else part for part, n in parts], dim=1)
        hidden, kv_cache = self.decoder(embeds, mask, kv_cache, start_pos)
        return self.decoder.head(hidden[:, -1]), PrefillState(kv_cache, mask)

    def stream(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        eos_token_id: int | None = None,
        n_samples: int = 1,
        shared_prefix_length: int = 0,
        use_kv_cache: bool = True,
    ) -> Iterator[Tensor]:
        """Yield token ids, (B * n_samples,), as they are chosen; see `models.decoding.stream_tokens`."""
        return stream_tokens(
            self,
            input_ids,
            images,
            attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_id=eos_token_id,
            n_samples=n_samples,
            shared_prefix_length=shared_prefix_length,
            use_kv_cache=use_kv_cache,
        )

    def generate(self, input_ids: Tensor, *args, **kwargs) -> Tensor:
        """All that `stream` yields with the same arguments, (B * n_samples, T_new)."""
        return collect_tokens(
            self.stream(input_ids, *args, **kwargs), len(input_ids) * kwargs.get("n_samples", 1), input_ids
        )

    def validate_images(self, input_ids: Tensor, images: Tensor | None) -> None:
        """Raise InputError unless images (N, 3, S, S) fill the places that ids (..., T) have for them."""
        wanted = int((input_ids == self.image_token_id).sum())
        given = 0 if images is None else len(images) * self.cfg.mp_image_token_length
        if wanted != given:
            raise InputError(f"the prompt holds {wanted} image tokens, but the images give {given} embeddings")

    def validate_length(self, prompt: int, max_new_tokens: int) -> None:
        """Raise InputError if a prompt of so many tokens and its answer exceed the model's positions."""
        limit = self.cfg.lm_max_position_embeddings
        if prompt + max_new_tokens - 1 > limit:  # the last token chosen is never read
            raise InputError(
                f"a prompt of {prompt} tokens and max_new_tokens={max_new_tokens} exceed "
                f"lm_max_position_embeddings={limit}; shorten either"
            )


@torch.no_grad()
def init_weights(module: nn.Module) -> None:
    """Embeddings N(0, 0.02), matrices N(0, 1/fan_in) (LeCun et al. 1998), biases 0.

    nanoVLM's 0.02 for every matrix suits widths near 2,500; at a width of 192 it lets so little of the picture
    through that training first learns for hundreds of steps to speak without looking.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, PatchEmbedding):  # reads pixels in [0, 1] as if they had been centred to [-1, 1]
        weight = module.conv.weight
        nn.init.normal_(weight, std=2 * weight[0].numel() ** -0.5)
        assert module.conv.bias is not None  # PatchEmbedding makes one
        module.conv.bias.copy_(-0.5 * weight.sum((1, 2, 3)))
        nn.init.normal_(module.position_embedding, std=0.5)
