"""InferenceModel: a VisionLanguageModel as fast as its device, precision and quantization allow."""

import copy
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from models.cache import KVCache, PrefillState
from models.decoding import GenerationMixin
from models.errors import InputError
from models.inference.kernel_network import KernelNetwork
from models.vision_language_model import VisionLanguageModel

logger = logging.getLogger(__name__)


class PlainNetwork:
    """The plain modules behind the interface of KernelNetwork: on GPUs, without a C compiler, and as the reference."""

    def __init__(self, model: VisionLanguageModel):
        self.model, self.cache_dtype = model, model.dtype
        self.encode_images, self.embed_tokens = model.encode_images, model.embed_tokens

    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None, prefix: PrefillState | None
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill_embeds`; the prefix may be of another dtype or device."""
        if prefix is not None:
            like = torch.empty(0, dtype=self.cache_dtype, device=self.model.device)
            kv_cache = [KVCache(kv.key.to(like), kv.value.to(like)) for kv in prefix.kv_cache]
            if kv_cache[0].key is not prefix.kv_cache[0].key:
                prefix = PrefillState(kv_cache, prefix.attention_mask)
        return self.model.prefill_embeds(embeds, attention_mask, prefix)

    def run(
        self, x: Tensor, cache: Tensor, past: Sequence[int], mask: None, last: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        """See `KernelNetwork.run`; of sequences with different `past`, one new token each."""
        (B, T, _), span = x.shape, max(past)
        rows, lengths, indices = (torch.tensor(n, device=x.device) for n in (range(B), past, slots))
        attention_mask, blocks = None, cache[:, :, indices, :, :span]
        if min(past) < span:  # what lies behind a sequence's tokens is padding, and may be anything
            used = torch.arange(span, device=x.device) < lengths[:, None]
            attention_mask = torch.cat([used, used.new_ones(B, T)], dim=1).long()
            blocks = blocks.masked_fill(~used[:, None, :, None], 0)
        kv_cache = [KVCache(key, value) for key, value in blocks] if span else None
        hidden, longer = self.model.decoder(x, attention_mask, kv_cache, span)
        places = lengths[:, None] + torch.arange(T, device=x.device)
        for (key, value), kv in zip(cache, longer):
            key[indices[:, None], :, places] = kv.key[:, :, span:].transpose(1, 2)
            value[indices[:, None], :, places] = kv.value[:, :, span:].transpose(1, 2)
        return self.model.decoder.head(hidden[rows, torch.tensor(last, device=x.device)])


Network = KernelNetwork | PlainNetwork


class InferenceModel(GenerationMixin):
    """Generates what a VisionLanguageModel generates, up to rounding, as fast as possible; for inference only.

    On CPUs with kernels (`models.inference.kernels`), models of the core's own modules in float32 or bfloat16 are
    computed by these; all others by the plain modules. It never changes the model and, unless quantized, reads the
    model's own weights. A change of the model (`load_state_dict`, `read_adapters`, `.to(...)`, an edit in place, an
    assignment, a hook) is noticed by the next prefill or image. What goes unseen is an edit through `tensor.data`, or
    of tensors made in inference mode, of a quantized weight, a norm or a bias, and a number such as a norm's eps: call
    `refresh` after it. A function set as a module's `attend` or `forward` is not used by the kernels, and of a
    subclass no other methods than encode_images, embed_tokens and prefill_embeds are called. With kernels, embeddings
    and logits are float32.

    quantize="int8" stores the language model's linear layers in 8 bits and, with kernels, the vision encoder's and the
    projector's, too; activations are then rounded to 8 bits for every matmul (dynamic quantization). "int4" stores
    those of the language model in 4 bits with a scale and a minimum for 32 weights. Raises InputError for other values.
    """

    def __init__(self, model: VisionLanguageModel, *, quantize: str | None = None):
        if quantize is not None:
            from models.inference.quantization import check_format

            check_format(quantize)
        _use_one_thread_in_forks()
        self.cfg, self.image_token_id = model.cfg, model.image_token_id
        self._source: VisionLanguageModel | None = model
        self._quantize = quantize
        self._lock = threading.Lock()
        self._state = _build(model, quantize)
        self.on_tile: Callable[[int, int], None] | None = None  # told how many of how many tiles are encoded, from 0 on

    @property
    def model(self) -> VisionLanguageModel:
        """The model whose weights this one follows. InputError if they were released."""
        if self._source is None:
            raise InputError(
                "the floating-point weights were released after quantization; "
                "load the model without quantize= to train, convert or save it"
            )
        return self._source

    @property
    def network(self) -> Network:
        """What computes with the current weights; see `KernelNetwork` for its methods."""
        state = self._state
        if self._source is None or state.fingerprint == _fingerprint(self._source)[0]:
            return state.network
        with self._lock:
            if self._state is state:
                logger.info("the model's weights have changed; rebuilding the inference model")
                self._state = _build(self._source, self._quantize)
        return self._state.network

    @property
    def device(self) -> torch.device:
        return (self._source or self._state.network.model).device

    @property
    def dtype(self) -> torch.dtype:
        return (self._source or self._state.network.model).dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that inference reads."""
        return self._state.network.model.parameters()

    def refresh(self) -> None:
        """Rebuild everything that is derived from the model's weights, without looking for a change."""
        if self._source is not None:
            self._state = _build(self._source, self._quantize)

    def release_source(self) -> None:
        """Forget the floating-point model, which is free once nobody else holds it. InputError if not quantized."""
        if self._quantize is None:
            raise InputError("release_source needs quantize=; without it, inference uses the model's own weights")
        self._source = None
        self._state = _State(self._state.network)
        if sys.platform == "linux":  # glibc keeps freed memory: here more than the quantized model takes
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """See `VisionLanguageModel.encode_images`."""
        network = self.network
        if self.on_tile is None:
            return network.encode_images(images)
        tiles = []
        for i, tile in enumerate(images.split(1)):
            self.on_tile(i, len(images))
            tiles.append(network.encode_images(tile))
        self.on_tile(len(images), len(images))
        return torch.cat(tiles)

    @torch.no_grad()
    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """See `VisionLanguageModel.embed_tokens`."""
        return self.network.embed_tokens(input_ids)

    @torch.no_grad()
    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None = None, prefix: PrefillState | None = None
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill_embeds`."""
        return self.network.prefill_embeds(embeds, attention_mask, prefix)

    @torch.no_grad()
    def decode(self, ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        """See `GenerationMixin.decode`."""
        network = self._state.network  # a change of the weights is noticed by the next prefill
        return network.prefill_embeds(network.embed_tokens(ids[:, None]), None, prefix)

    def __reduce__(self) -> tuple:
        """deepcopy and pickle take the model along, or the private network's once the model was released."""
        released = self._state.network.model if self._source is None else None
        return _restore, (self._source, self._quantize, released)


@cache
def _use_one_thread_in_forks() -> None:
    """In the child of a fork, OpenMP would wait for threads that only the parent has."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def _restore(
    source: VisionLanguageModel | None, quantize: str | None, released: VisionLanguageModel | None
) -> InferenceModel:
    if source is not None:
        return InferenceModel(source, quantize=quantize)
    assert released is not None
    inference = InferenceModel(released)
    inference._source, inference._quantize = None, quantize
    return inference


@dataclass(frozen=True)
class _State:
    """All that is derived from a model's weights."""

    network: Network
    fingerprint: tuple = ()  # of the model when this was made; () once it was released
    tensors: Sequence[Tensor] = ()  # of the model then, so that no address in the fingerprint returns


@torch.inference_mode(False)
@torch.no_grad()
def _build(model: VisionLanguageModel, quantize: str | None) -> _State:
    """The network for a model: its own modules, or a tree of new ones that share its parameters, quantized."""
    (fingerprint, tensors), used = _fingerprint(model), model
    if quantize:
        from models.inference.quantization import quantize_linears  # here, as most models are not quantized

        used = share_modules(model).eval()
        quantize_linears(used.decoder, quantize)
        if quantize == "int8" and KernelNetwork.supports(model):  # elsewhere int8 saves memory, and costs time
            quantize_linears(used.vision_encoder, quantize)
            quantize_linears(used.MP, quantize)
    return _State(_network(used), fingerprint, tensors)


def _network(model: VisionLanguageModel) -> Network:
    return KernelNetwork(model) if KernelNetwork.supports(model) else PlainNetwork(model)


def _fingerprint(model: VisionLanguageModel) -> tuple[tuple, list[Tensor]]:
    """What differs after any change of modules or weights that torch knows of; and all tensors."""
    modules: list[nn.Module] = [model]
    for module in modules:  # twice as fast as model.modules()
        modules += [child for child in module._modules.values() if child is not None]
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    versions = [-1 if t.is_inference() else t._version for t in tensors]  # those of inference mode do not count changes
    n_hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    return ([*map(id, modules)], n_hooks, [(t.data_ptr(), t.dtype) for t in tensors], versions), tensors


def share_modules(model: VisionLanguageModel) -> VisionLanguageModel:
    """A copy with new modules and the same parameters, buffers and hooks; its modules can be replaced."""
    modules = list(model.modules())
    shared: list[Any] = [x for m in modules for x in (*m.parameters(False), *m.buffers(False))]
    shared += [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return copy.deepcopy(model, {id(x): x for x in (model.cfg, *shared)})
