"""InferenceModel: a VisionLanguageModel as fast as its device, precision and quantization allow."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from models.config import VLMConfig
from models.decoding import GenerationMixin
from models.errors import CompileError, InputError
from models.inference.aot_compile import compile_block, load_compiled_decode
from models.inference.compiled_ops import load_ops
from models.inference.cpu_kernels import onednn_pays_off, replace_linears
from models.inference.decode_step import DecodeStep
from models.inference.fused_decode_step import DecodeFunction, FusedDecodeStep
from models.inference.fused_prefill import fuse_decoder
from models.inference.fused_vision import fuse_projector, fuse_vision
from models.inference.int8_blocks import Int8VisionTransformer, quantize_activations
from models.inference.live_weights import Fingerprint, share_modules
from models.inference.quantization import pack_quantized, quantizer
from models.language_model import LanguageModel
from models.modality_projector import ModalityProjector
from models.vision_language_model import PrefillState, VisionLanguageModel
from models.vision_transformer import VisionTransformer

logger = logging.getLogger(__name__)


class InferenceModel(GenerationMixin):
    """Generates what a VisionLanguageModel generates, up to rounding, as fast as possible; for inference only.

    It never changes the model. It builds a private network whose modules are made for inference and whose parameters
    are the model's own. When the model's modules or parameters change, the next call rebuilds the network: after
    `load_state_dict`, `read_adapters`, `.to(...)` or an assignment, results follow the new weights. The one change that
    goes unseen is an edit through `tensor.data` of a quantized model: call `refresh` after it.

    quantize="int8" stores the linear layers in 8 bits, and on CPUs with AVX512-VNNI rounds their inputs to 8 bits, too,
    where there are many rows: in vision encoder, projector and prefill. "int8-weights" stores those of the language
    model in 8 bits, "int4" in 4 bits with a scale and a zero point for 32 weights. compile=True compiles the decoder
    block on a CPU, which takes up to a minute once (see `models.inference.aot_compile`), and what is computed between
    products, in a second (`models.inference.compiled_ops`); None uses what was compiled before, False does not.
    int4 weights cannot be compiled. Raises InputError for other values, CompileError if the step cannot be compiled.
    """

    def __init__(self, model: VisionLanguageModel, *, quantize: str | None = None, compile: bool | None = None):
        if quantize is not None:
            quantizer(quantize)
        if quantize == "int4" and compile:
            raise InputError("the compiled block does not read int4 weights; leave compile away, or use int8")
        self._source: VisionLanguageModel | None = model
        self._quantize, self._compile = quantize, compile
        self._lock = threading.Lock()
        self._state = _build(model, quantize, compile)

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
    def network(self) -> VisionLanguageModel:
        """The private network with the current weights; for code that drives the layers itself. Do not train it."""
        return self._current().network

    @property
    def cfg(self) -> VLMConfig:
        return self._state.network.cfg

    @property
    def image_token_id(self) -> int:
        return self._state.network.image_token_id

    @property
    def device(self) -> torch.device:
        return (self._source or self._state.network).device

    @property
    def dtype(self) -> torch.dtype:
        return (self._source or self._state.network).dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that inference reads."""
        return self._state.network.parameters()

    def refresh(self) -> None:
        """Rebuild everything that is derived from the model's weights, without looking for a change."""
        if self._source is not None:
            self._state = _build(self._source, self._quantize, self._recompile)

    def release_source(self) -> None:
        """Forget the floating-point model, which is free once nobody else holds it. InputError if not quantized."""
        if self._quantize is None:
            raise InputError("release_source needs quantize=; without it, inference uses the model's own weights")
        self._source = None
        self._state = replace(self._state, fingerprint=None, decoder_fingerprint=None)

    @torch.no_grad()
    def embed(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        """See `VisionLanguageModel.embed`."""
        return self.network.embed(input_ids, images)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """See `VisionLanguageModel.encode_images`."""
        return self.network.encode_images(images)

    @torch.no_grad()
    def embed_encoded(self, input_ids: Tensor, image_embeds: Tensor | None) -> Tensor:
        """See `VisionLanguageModel.embed_encoded`."""
        return self.network.embed_encoded(input_ids, image_embeds)

    @torch.no_grad()
    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """See `VisionLanguageModel.embed_tokens`."""
        return self.network.embed_tokens(input_ids)

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        attention_mask: Tensor | None = None,
        prefix: PrefillState | None = None,
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill`."""
        state = self._current()
        state.check_prefix(prefix)
        return state.network.prefill(input_ids, images, attention_mask, prefix)

    @torch.no_grad()
    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None = None, prefix: PrefillState | None = None
    ) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.prefill_embeds`."""
        state = self._current()
        state.check_prefix(prefix)
        return state.network.prefill_embeds(embeds, attention_mask, prefix)

    @torch.no_grad()
    def decode(self, ids: Tensor, prefix: PrefillState) -> tuple[Tensor, PrefillState]:
        """See `VisionLanguageModel.decode`. A single sequence without padding takes the compiled or the fused step."""
        state = self._current(decoder_only=True)
        state.check_prefix(prefix)
        full = prefix.length >= state.network.cfg.lm_max_position_embeddings  # the network raises the error
        if state.step is None or len(ids) > 1 or prefix.attention_mask is not None or full:
            return state.network.decode(ids, prefix)
        kv_cache = [kv.reserve(1) for kv in prefix.kv_cache]
        keys, values = zip(*(kv.buffer for kv in kv_cache))
        position = torch.full((1,), prefix.length, device=ids.device)
        return state.step(ids, position, keys, values), PrefillState(kv_cache)

    def validate_images(self, input_ids: Tensor, images: Tensor | None) -> None:
        """See `VisionLanguageModel.validate_images`."""
        self._state.network.validate_images(input_ids, images)

    def validate_length(self, prompt: int, max_new_tokens: int) -> None:
        """See `VisionLanguageModel.validate_length`."""
        self._state.network.validate_length(prompt, max_new_tokens)

    def __getstate__(self) -> dict:
        """What deepcopy and pickle take along: the model, or the private network once the model was released."""
        network = self._state.network if self._source is None else None
        return {"model": self._source, "network": network, "quantize": self._quantize, "compile": self._compile}

    def __setstate__(self, state: dict) -> None:
        self._source, self._quantize, self._compile = state["model"], state["quantize"], state["compile"]
        self._lock = threading.Lock()
        if self._source is None:
            self._state = _with_step(state["network"], self._recompile, None)
        else:
            self._state = _build(self._source, self._quantize, self._recompile)

    @property
    def _recompile(self) -> bool | None:
        """The compile option for a rebuild, which uses what was compiled but never stops to compile."""
        return None if self._compile else self._compile

    def _current(self, decoder_only: bool = False) -> "_State":
        """The derived state, rebuilt if the weights have changed since the last call."""
        state = self._state
        if self._source is None or state.is_current(decoder_only):
            return state
        with self._lock:
            if self._state is state:
                logger.info("the model's weights have changed; rebuilding the inference model")
                self._state = _build(self._source, self._quantize, self._recompile)
                if self._compile and not self._state.compiled:
                    logger.warning("no compiled block fits the changed model; InferenceModel(compile=True) makes one")
        return self._state


@dataclass(frozen=True)
class _State:
    """All that is derived from a model's weights."""

    network: VisionLanguageModel
    dtype: torch.dtype  # of the decoder's activations, and their device
    device: torch.device
    step: DecodeFunction | None
    compiled: bool
    fingerprint: Fingerprint | None  # None once the model was released
    decoder_fingerprint: Fingerprint | None

    def is_current(self, decoder_only: bool) -> bool:
        fingerprint = self.decoder_fingerprint if decoder_only else self.fingerprint
        return fingerprint is None or fingerprint.matches()

    def check_prefix(self, prefix: PrefillState | None) -> None:
        """Raise InputError for a prefix in another dtype or on another device."""
        if prefix is None:
            return
        key = prefix.kv_cache[0].key
        if key.dtype != self.dtype or key.device != self.device:
            raise InputError(
                f"the prefix was computed in {key.dtype} on {key.device}, but the model is now in {self.dtype} on "
                f"{self.device}; prefill the prompt again"
            )


@torch.inference_mode(False)
@torch.no_grad()
def _build(model: VisionLanguageModel, quantize: str | None, compile: bool | None) -> _State:
    fingerprints = Fingerprint(model, bool(quantize)), Fingerprint(model.decoder, bool(quantize))
    network, ops = share_modules(model).eval(), load_ops(compile if model.device.type == "cpu" else False)
    if quantize:
        quantizer(quantize)(network.decoder)
        network.decoder.pack_projections(pack_quantized)
    if quantize == "int8":
        quantize_activations(network, ops)
    if model.device.type == "cpu":
        if onednn_pays_off():
            replace_linears(network)
        if not isinstance(network.vision_encoder, Int8VisionTransformer):
            network.vision_encoder = cast(VisionTransformer, fuse_vision(network.vision_encoder, ops))
        network.MP = cast(ModalityProjector, fuse_projector(network.MP))
        fuse_decoder(network.decoder, ops)
    return _with_step(network, compile, fingerprints)


@torch.inference_mode(False)
@torch.no_grad()
def _with_step(
    network: VisionLanguageModel, compile: bool | None, fingerprints: tuple[Fingerprint, Fingerprint] | None
) -> _State:
    step = _compiled_step(network.decoder, compile) if compile is not False else None
    compiled = step is not None
    if step is None and FusedDecodeStep.supports(network.decoder):
        step = FusedDecodeStep(network.decoder)
    weight = network.decoder.norm.weight
    return _State(network, weight.dtype, weight.device, step, compiled, *(fingerprints or (None, None)))


def _compiled_step(decoder: LanguageModel, compile: bool | None) -> DecodeFunction | None:
    """The compiled decode step: compiled now if need be and compile is True, else only if it is in the cache."""
    if decoder.norm.weight.device.type != "cpu":
        return torch.compile(DecodeStep(decoder), mode="reduce-overhead") if compile else None
    step = load_compiled_decode(decoder)
    if step is None and compile:
        path = compile_block(decoder.blocks[0])
        step = load_compiled_decode(decoder)
        if step is None:
            raise CompileError(f"{path} was compiled, but cannot be loaded")
    return step
