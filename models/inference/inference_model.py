"""InferenceModel: a VisionLanguageModel as fast as its device, precision and quantization allow."""

import copy
import ctypes
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import KVCache, PrefillState
from models.common.errors import InputError
from models.common.options import QUANTIZATIONS
from models.inference.kernel_network import KernelNetwork
from models.inference.proof import ADAPTERS, Proof, difference_of_process
from models.inference.quantization import QuantizedLinear, find_library, move_to_huge_pages, quantize_linears
from models.vision_language_model import VisionLanguageModel

logger = logging.getLogger(__name__)


class PlainNetwork:
    """The plain modules behind the interface of KernelNetwork: on GPUs, without a C compiler, and as the reference."""

    def __init__(self, model: VisionLanguageModel, is_edited: bool = False):
        self.model = model
        self.is_edited = is_edited  # then a `ContinuousBatch` asks the model's own `stream` instead
        self.cache_dtype = model.dtype
        self.encode_images = model.encode_images
        self.embed_tokens = model.embed_tokens
        self.embed_encoded = model.embed_encoded

    def prefill(self, rows: Sequence[Tensor], cache: Tensor, start: int, slots: Sequence[int]) -> Tensor:
        """See `KernelNetwork.prefill`. Padding is on the left, where the core's last step expects it."""
        lengths = [len(row) for row in rows]
        T = max(lengths)
        x = torch.stack([F.pad(row, (0, 0, T - len(row), 0)) for row in rows])
        used = torch.arange(T, device=x.device) >= T - torch.tensor(lengths, device=x.device)[:, None]
        mask = None if min(lengths) == T else used.long()
        starts = [start] * len(rows)
        logits, state = self.model.prefill_embeds(x, mask, self._prefix(cache, starts, slots))
        self._write(cache, state, used, starts, slots)
        return logits

    def decode_tokens(self, ids: Tensor, cache: Tensor, past: Sequence[int], slots: Sequence[int]) -> Tensor:
        """See `KernelNetwork.decode_tokens`."""
        if ids.size(1) > 1:
            return self.prefill([*self.model.embed_tokens(ids)], cache, past[0], slots)
        prefix = self._prefix(cache, past, slots)
        assert prefix is not None  # a prompt has tokens
        logits, state = self.model.decode(ids[:, 0], prefix)
        self._write(cache, state, torch.ones_like(ids, dtype=torch.bool), past, slots)
        return logits

    def _prefix(self, cache: Tensor, past: Sequence[int], slots: Sequence[int]) -> PrefillState | None:
        """What the slots hold; what lies behind a sequence's tokens is padding, and may be anything."""
        if not (span := max(past)):
            return None
        blocks = cache[:, :, torch.tensor(slots, device=cache.device), :, :span]
        mask = None
        if min(past) < span:
            used = torch.arange(span, device=cache.device) < torch.tensor(past, device=cache.device)[:, None]
            blocks = blocks.masked_fill(~used[:, None, :, None], 0)
            mask = used.long()
        return PrefillState([KVCache(key, value) for key, value in blocks], mask)

    def _write(
        self, cache: Tensor, state: PrefillState, used: Tensor, past: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Put the keys and values of new tokens, those of used (B, T), behind the `past` ones of each slot."""
        rows, columns = used.nonzero(as_tuple=True)
        at = torch.tensor(slots, device=rows.device)[rows]
        places = torch.tensor(past, device=rows.device)[rows] + used.cumsum(1)[rows, columns] - 1
        columns = columns + max(past)
        for (key, value), kv in zip(cache, state.kv_cache):
            key[at, :, places] = kv.key[rows, :, columns]
            value[at, :, places] = kv.value[rows, :, columns]


Network = KernelNetwork | PlainNetwork


class InferenceModel:
    """The network by which a `ContinuousBatch` computes a model, as fast as possible; for inference only.

    On CPUs with kernels (`models.inference.kernels`), a model in float32 or bfloat16 is computed by these if they were
    written for its modules (`models.inference.proof`); else by the modules, and a line says why. It never changes the
    model and, unless quantized, reads the model's own weights. The next prefill or image notices weights that were
    loaded, trained or edited in place, and changed modules, hooks and functions. Call `refresh` after an edit through
    `tensor.data` or under inference mode. With kernels, embeddings and logits are float32.

    quantize="int8" stores the language model's linear layers in 8 bits and, with kernels, the vision encoder's and the
    projector's, too; activations are then rounded to 8 bits for every matmul (dynamic quantization). "int4" stores
    those of the language model in 4 bits with a scale and a minimum for 32 weights, the head in 8 bits. Raises
    InputError for other values.
    """

    def __init__(self, model: VisionLanguageModel, *, quantize: str | None = None):
        if quantize not in (None, *QUANTIZATIONS):
            names = ", ".join(map(repr, QUANTIZATIONS))
            raise InputError(f"quantize={quantize!r} is not supported; use {names} or None")
        self.cfg = model.cfg
        self.image_token_id = model.image_token_id
        self._source: VisionLanguageModel | None = model
        self._quantize = quantize
        self._used = model  # the one whose modules compute: the source, or its quantized copy
        self._difference = ""
        self._lock = threading.RLock()
        self.refresh()

    @property
    def model(self) -> VisionLanguageModel:
        """The model whose weights this one follows. InputError if they were released, or are quantized."""
        if self._source is None:
            raise InputError(
                "the floating-point weights were released after quantization; "
                "load the model without quantize= to train, convert or save it"
            )
        if any(isinstance(module, QuantizedLinear) for module in self._source.modules()):
            raise InputError("no file's format has quantized weights; load the floating-point model to save it")
        return self._source

    @property
    def network(self) -> Network:
        """Network of the current weights; see `KernelNetwork` for its methods."""
        with self._lock:
            if self._proof.has_changed():
                logger.info("the model has changed; rebuilding the inference model")
                self.refresh()
            elif difference_of_process() != self._process:
                self.refresh()
            return self._network

    @property
    def difference(self) -> str:
        """The first difference of core or model from what the kernels were written for; "" if there is none."""
        with self._lock:
            _ = self.network
            return self._difference

    @property
    def device(self) -> torch.device:
        return self._used.device

    @property
    def dtype(self) -> torch.dtype:
        return self._used.dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that inference reads."""
        return self._used.parameters()

    def refresh(self) -> None:
        """Rebuild everything that is derived from the model's weights, without looking for a change."""
        with self._lock:
            used = self._source or self._used
            check_memory(used)
            self._proof = Proof(used)
            self._process = difference_of_process()
            said, self._difference = self._difference, self._proof.difference()
            has_kernels = find_library(used) is not None
            if has_kernels and self._difference not in ("", ADAPTERS, said):
                logger.warning("the model's modules are used instead of the faster kernels: %s", self._difference)
            has_kernels = has_kernels and not self._difference
            if self._source is not None and self._quantize:
                used = _quantized_copy(self._source, self._quantize, has_kernels)
            self._used = used
            is_edited = self._difference not in ("", ADAPTERS)
            self._network: Network = KernelNetwork(used) if has_kernels else PlainNetwork(used, is_edited)

    def release_source(self) -> None:
        """Forget the floating-point model, which is free once nobody else holds it. InputError if not quantized."""
        if self._quantize is None:
            raise InputError("release_source needs quantize=; without it, inference uses the model's own weights")
        self._source = None
        self._proof = Proof(self._used)
        if sys.platform == "linux":  # glibc keeps freed memory: here more than the quantized model takes
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """See `VisionLanguageModel.encode_images`."""
        return self.network.encode_images(images)


@torch.inference_mode(False)
@torch.no_grad()
def _quantized_copy(model: VisionLanguageModel, quantize: str, with_images: bool) -> VisionLanguageModel:
    """A tree of new modules that share a model's parameters, but for those of quantized layers."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.check()
    copied = _share_modules(model)
    quantize_linears(copied.decoder, quantize)
    if quantize == "int8" and with_images:  # elsewhere int8 saves memory, and costs time
        quantize_linears(copied.vision_encoder, quantize)
        quantize_linears(copied.MP, quantize)
    move_to_huge_pages([p for m in copied.modules() if isinstance(m, QuantizedLinear) for p in m.parameters()])
    return copied


def check_memory(model: VisionLanguageModel) -> None:
    """Raise InputError if the memory of a parameter was freed: the kernels would read beyond it."""
    for name, p in model.named_parameters():
        last = p.storage_offset() + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride()))
        if p.numel() and (last + 1) * p.itemsize > p.untyped_storage().nbytes():
            raise InputError(f"the memory of {name} was freed by resizing its storage; load the model again")


def _share_modules(model: VisionLanguageModel) -> VisionLanguageModel:
    """A copy with new modules and the same parameters, buffers and hooks; its modules can be replaced."""
    modules = list(model.modules())
    shared: list[Any] = [x for m in modules for x in (*m.parameters(False), *m.buffers(False))]
    shared += [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return copy.deepcopy(model, {id(x): x for x in (model.cfg, *shared)})
