"""A model whose current KV cache can be looked at while `models.decoding.stream_tokens` generates with it."""

from torch import Tensor

from models.cache import storage_bytes
from models.inference.inference_model import InferenceModel
from models.vision_language_model import PrefillState, VisionLanguageModel


class CacheObserver:
    """Delegates to a model and keeps the last state it returned, which is the cache of a running generation."""

    def __init__(self, model: VisionLanguageModel | InferenceModel):
        self.model = model
        self.state: PrefillState | None = None  # None before the prefill

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of every block, (B, n_kv_heads, T, head_dim) each."""
        return [tensor for kv in self.state.kv_cache for tensor in (kv.key, kv.value)] if self.state else []

    @property
    def bytes_used(self) -> int:
        """Bytes of the keys and values of all tokens in the cache."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the memory behind them, unused capacity included."""
        return storage_bytes(self.tensors)

    @property
    def image_token_id(self) -> int:
        return self.model.image_token_id

    def embed(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        return self.model.embed(input_ids, images)

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def validate_length(self, prompt: int, max_new_tokens: int) -> None:
        self.model.validate_length(prompt, max_new_tokens)

    def prefill(
        self,
        input_ids: Tensor,
        images: Tensor | None,
        attention_mask: Tensor | None,
        prefix: PrefillState | None,
    ) -> tuple[Tensor, PrefillState]:
        logits, self.state = self.model.prefill(input_ids, images, attention_mask, prefix)
        return logits, self.state

    def prefill_embeds(self, embeds: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, PrefillState]:
        return self.model.prefill_embeds(embeds, attention_mask)

    def decode(self, ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        logits, self.state = self.model.decode(ids, prefix)
        return logits, self.state
