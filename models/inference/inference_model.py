"""InferenceModel: a VisionLanguageModel as fast as its device, precision and quantization allow."""

import copy
import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from models.cache import KVCache
from models.config import VLMConfig
from models.decoding import GenerationMixin
from models.errors import InputError
from models.inference.kernel_network import KernelNetwork, empty_cache
from models.vision_language_model import PrefillState, VisionLanguageModel

if TYPE_CHECKING:
    from models.inference.image_store import ImageStore

logger = logging.getLogger(__name__)

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class PlainNetwork:
    """The plain modules behind the interface of KernelNetwork: on GPUs, without a C compiler, and as the reference."""

    def __init__(self, model: VisionLanguageModel):
        self.model = model
        self.cache_dtype = model.dtype

    def encode_images(self, images: Tensor) -> Tensor:
        """See `VisionLanguageModel.encode_images`."""
        return self.model.encode_images(images)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """See `VisionLanguageModel.embed_tokens`."""
        return self.model.embed_tokens(ids)

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

    def new_cache(self, n_sequences: int, capacity: int) -> Tensor:
        """An empty cache for `run`."""
        return empty_cache(self.model, n_sequences, capacity, self.cache_dtype)

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
    assignment) is noticed by the next prefill or image. The one change that goes unseen is an edit through
    `tensor.data` of a quantized weight, a norm or a bias: call `refresh` after it.

    quantize="int8" stores the language model's linear layers in 8 bits and, with kernels, the vision encoder's and the
    projector's, too; activations are then rounded to 8 bits for every matmul (dynamic quantization). "int4" stores
    those of the language model in 4 bits with a scale and a minimum for 32 weights. Raises InputError for other values.
    image_cache_dir is a folder that keeps encoded images for later runs, see `models.inference.image_store`.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        *,
        quantize: str | None = None,
        image_cache_dir: str | PathLike | None = None,
    ):
        if quantize is not None:
            from models.inference.quantization import check_format

            check_format(quantize)
        self._source: VisionLanguageModel | None = model
        self._quantize = quantize
        self._lock = threading.Lock()
        self._state = _build(model, quantize)
        self.image_store: ImageStore | None = None
        if image_cache_dir is not None:
            from models.inference import image_store  # here, as few runs keep images

            self.image_store = image_store.ImageStore(image_cache_dir)
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
        if self._source is None or state.fingerprint == _fingerprint(self._source):
            return state.network
        with self._lock:
            if self._state is state:
                logger.info("the model's weights have changed; rebuilding the inference model")
                self._state = _build(self._source, self._quantize)
        return self._state.network

    @property
    def cfg(self) -> VLMConfig:
        return self._state.network.model.cfg

    @property
    def image_token_id(self) -> int:
        return self._state.network.model.image_token_id

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
        self._state = _State(self._state.network, ())
        if sys.platform == "linux":  # glibc keeps freed memory: here more than the quantized model takes
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    @torch.no_grad()
    def embed(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        """See `VisionLanguageModel.embed`. The dtype is float32 with kernels."""
        return self._embed(self.network, input_ids, images)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """See `VisionLanguageModel.encode_images`. The dtype is float32 with kernels."""
        return self._encode(self.network, images)

    @torch.no_grad()
    def embed_encoded(self, input_ids: Tensor, image_embeds: Tensor | None) -> Tensor:
        """See `VisionLanguageModel.embed_encoded`. The dtype is float32 with kernels."""
        is_image = input_ids == self.image_token_id
        x = self.embed_tokens(input_ids.masked_fill(is_image, 0))  # any id will do there
        return x if image_embeds is None else x.masked_scatter(is_image[..., None], image_embeds.to(x.dtype))

    @torch.no_grad()
    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """See `VisionLanguageModel.embed_tokens`. The dtype is float32 with kernels."""
        return self._state.network.embed_tokens(input_ids)

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        prefix: PrefillState | None = None,
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill`. Logits are float32 with kernels."""
        network = self.network
        if attention_mask is not None and bool((attention_mask == 1).all()):
            attention_mask = None
        return network.prefill_embeds(self._embed(network, input_ids, images), attention_mask, prefix)

    @torch.no_grad()
    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None = None, prefix: PrefillState | None = None
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill_embeds`. Logits are float32 with kernels."""
        return self.network.prefill_embeds(embeds, attention_mask, prefix)

    @torch.no_grad()
    def decode(self, ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.decode`. Logits are float32 with kernels."""
        network = self._state.network  # a change of the weights is noticed by the next prefill
        return network.prefill_embeds(network.embed_tokens(ids[:, None]), None, prefix)

    def validate_images(self, input_ids: Tensor, images: Tensor | None) -> None:
        """See `VisionLanguageModel.validate_images`."""
        self._state.network.model.validate_images(input_ids, images)

    def validate_length(self, prompt: int, max_new_tokens: int) -> None:
        """See `VisionLanguageModel.validate_length`."""
        self._state.network.model.validate_length(prompt, max_new_tokens)

    def _embed(self, network: Network, input_ids: Tensor, images: Tensor | None) -> Tensor:
        self.validate_images(input_ids, images)
        if images is None or not len(images):
            return self.embed_encoded(input_ids, None)
        return self.embed_encoded(input_ids, self._encode(network, images).flatten(0, 1))

    def _encode(self, network: Network, images: Tensor) -> Tensor:
        if self.image_store is None:
            return self._encode_now(network, images)
        encoder = self._state.encoder
        return self.image_store.encode(images, encoder, partial(self._encode_now, network))

    def _encode_now(self, network: Network, images: Tensor) -> Tensor:
        if self.on_tile is None:
            return network.encode_images(images)
        tiles = []
        for i, tile in enumerate(images.split(1)):
            self.on_tile(i, len(images))
            tiles.append(network.encode_images(tile))
        self.on_tile(len(images), len(images))
        return torch.cat(tiles)

    def __getstate__(self) -> dict:
        """What deepcopy and pickle take along: the model, or the private network once the model was released."""
        network = self._state.network.model if self._source is None else None
        return {"model": self._source, "network": network, "quantize": self._quantize}

    def __setstate__(self, state: dict) -> None:
        self._source, self._quantize = state["model"], state["quantize"]
        self.on_tile = self.image_store = None
        self._lock = threading.Lock()
        if self._source is None:
            self._state = _State(_network(state["network"]), ())
        else:
            self._state = _build(self._source, self._quantize)


@dataclass(frozen=True)
class _State:
    """All that is derived from a model's weights."""

    network: Network
    fingerprint: tuple  # of the model when this was made; () once it was released

    @cached_property
    def encoder(self) -> str:
        """The digest of what encodes images."""
        model, level = self.network.model, getattr(self.network, "level", "torch")
        sizes = {name: value for name, value in vars(model.cfg).items() if name.startswith(("vit_", "mp_"))}
        settings = f"{level} {model.device.type} {torch.__version__} {model.cfg.format.name} {sizes}"
        from models.inference.image_store import encoder_digest

        return encoder_digest(model.vision_encoder, model.MP, settings=settings)


@torch.inference_mode(False)
@torch.no_grad()
def _build(model: VisionLanguageModel, quantize: str | None) -> _State:
    """The network for a model: its own modules, or a tree of new ones that share its parameters, quantized."""
    fingerprint, used = _fingerprint(model), model
    if quantize:
        from models.inference.quantization import quantize_linears  # here, as most models are not quantized

        used = share_modules(model).eval()
        quantize_linears(used.decoder, quantize)
        if quantize == "int8" and KernelNetwork.supports(model):  # elsewhere int8 saves memory, and costs time
            quantize_linears(used.vision_encoder, quantize)
            quantize_linears(used.MP, quantize)
    return _State(_network(used), fingerprint)


def _network(model: VisionLanguageModel) -> Network:
    return KernelNetwork(model) if KernelNetwork.supports(model) else PlainNetwork(model)


def _fingerprint(model: VisionLanguageModel) -> tuple:
    """Differs after any change of modules or weights that torch knows of. Keeps the tensors: no address returns."""
    modules = list(model.modules())
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    return [id(m) for m in modules], [(t.data_ptr(), t.dtype, _version(t)) for t in tensors], _Held(tensors)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; tensors made in torch's inference mode do not count that."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


class _Held(list):
    """Tensors that are kept alive; equal to every other list of this kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    __hash__ = None


def share_modules(module: AnyModule) -> AnyModule:
    """A copy of a module tree with new modules and the same parameters, buffers and hooks.

    Modules of the copy can be replaced, and the original does not change.
    """
    return _share(module, {})


def _share(module, copies: dict):
    if id(module) not in copies:
        copied = copies[id(module)] = copy.copy(module)
        copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
        copied._modules = {name: child and _share(child, copies) for name, child in module._modules.items()}
    return copies[id(module)]
