"""A VisionLanguageModel whose vision encoder and decoder run in the C kernels: packing structs and calling."""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models import language_model, vision_transformer
from models.cache import KVCache, PrefillState, capacity_for
from models.config import VLMConfig
from models.errors import InputError
from models.inference.kernels.load import (
    LONG,
    POINTER,
    WITHOUT_BF16_DOT,
    Decoder,
    DecoderBlock,
    DecoderStep,
    Matrix,
    VisionBlock,
    VisionEncoder,
    chosen_level,
    load_library,
)
from models.language_model import build_attention_mask, rope_cos_sin
from models.modality_projector import pixel_shuffle
from models.vision_language_model import VisionLanguageModel, empty_model

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # the numbers in common.h
QUANTIZED = {"int8": 2, "int4": 3}
MAX_PATCHES = 1024  # of images that are encoded together; activations of more leave the CPU's cache


class Packer:
    """Makes structs of tensors and layers, and keeps what they point to in memory."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def vector(self, x: Tensor | None) -> int | None:
        """The address of a vector in float32; None for None."""
        if x is None:
            return None
        self.kept.append(x.detach().float().contiguous())
        return self.kept[-1].data_ptr()

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """The struct of a floating-point weight (n_rows, depth)."""
        self.kept.append(weight := weight.detach().contiguous())
        size = (*weight.shape, weight.size(1), DTYPES[weight.dtype])
        return Matrix(weight.data_ptr(), None, None, self.vector(bias), *size)

    def matrix(self, layer: Any) -> Matrix:
        """The struct of an nn.Linear or QuantizedLinear."""
        if isinstance(layer, nn.Linear):
            return self.dense(layer.weight, layer.bias)
        self.kept.append(layer)
        scale, groups = (None if x is None else x.data_ptr() for x in (layer.scale, layer.groups))
        size = layer.out_features, layer.in_features, layer.stride, QUANTIZED[layer.format]
        return Matrix(layer.data.data_ptr(), scale, groups, self.vector(layer.bias), *size)

    def decoder(self, decoder: language_model.LanguageModel, cfg: VLMConfig) -> Decoder:
        """The struct of a decoder."""
        cos, sin = rope_cos_sin(torch.arange(cfg.lm_max_position_embeddings, device="cpu"), cfg)
        blocks = (DecoderBlock * len(decoder.blocks))()
        for packed, block in zip(blocks, decoder.blocks):
            attn, mlp = block.attn, block.mlp
            packed.qkv[:] = [self.matrix(linear) for linear in (attn.q_proj, attn.k_proj, attn.v_proj)]
            packed.gate_up[:] = [self.matrix(linear) for linear in (mlp.gate_proj, mlp.up_proj)]
            packed.out, packed.down = self.matrix(attn.out_proj), self.matrix(mlp.down_proj)
            packed.norm1, packed.norm2 = self.vector(block.norm1.weight), self.vector(block.norm2.weight)
        head = self.matrix(decoder.head)
        self.kept += [blocks, head]
        angles = (self.vector(angle[:, : cfg.lm_head_dim // 2]) for angle in (cos, sin))
        return Decoder(
            ctypes.addressof(blocks), ctypes.addressof(head), self.vector(decoder.norm.weight), *angles, len(blocks),
            cfg.lm_hidden_dim, cfg.lm_inter_dim, cfg.lm_n_heads, cfg.lm_n_kv_heads, cfg.lm_head_dim, decoder.norm.eps,
        )  # fmt: skip

    def encoder(self, encoder: vision_transformer.VisionTransformer, cfg: VLMConfig, bf16: bool) -> VisionEncoder:
        """The struct of a vision encoder; bf16 says whether attention multiplies in bfloat16."""
        embedding = encoder.patch_embedding
        positions = embedding.position_embedding[0]
        positions = positions if embedding.position_ids is None else positions[embedding.position_ids]
        patch = self.dense(embedding.conv.weight.flatten(1), embedding.conv.bias)
        blocks = (VisionBlock * len(encoder.blocks))()
        for packed, block in zip(blocks, encoder.blocks):
            packed.qkv, packed.out = self.matrix(block.attn.qkv_proj), self.matrix(block.attn.out_proj)
            packed.fc1, packed.fc2 = self.matrix(block.mlp.fc1), self.matrix(block.mlp.fc2)
            packed.ln1, packed.ln1_bias = self.vector(block.ln1.weight), self.vector(block.ln1.bias)
            packed.ln2, packed.ln2_bias = self.vector(block.ln2.weight), self.vector(block.ln2.bias)
        self.kept += [blocks, patch]
        norm = encoder.layer_norm
        return VisionEncoder(
            ctypes.addressof(blocks), ctypes.addressof(patch), self.vector(positions), self.vector(norm.weight),
            self.vector(norm.bias), len(blocks), cfg.vit_hidden_dim, cfg.vit_inter_dim, cfg.vit_n_heads,
            cfg.vit_grid**2, DTYPES[torch.bfloat16 if bf16 else torch.float32], norm.eps,
        )  # fmt: skip


def linear(library: ctypes.CDLL, matrix: Matrix, x: Tensor) -> Tensor:
    """A linear layer by the kernels: x (..., depth) float32 to (..., n_rows) float32."""
    x, n = x.contiguous(), x[..., 0].numel()
    y = x.new_empty(*x.shape[:-1], matrix.n_rows)
    if n:
        pointers = POINTER(x.data_ptr()), LONG(n), POINTER(y.data_ptr())
        library.linear_rows(ctypes.byref(matrix), *pointers, torch.get_num_threads())
    return y


def _check_device(x: Tensor) -> None:
    """InputError unless the kernels, which take addresses, can read a tensor."""
    if x.device.type != "cpu":
        raise InputError(f"a tensor is on {x.device}, but the model on cpu; move either")


def _has_modules_of_config(model: VisionLanguageModel) -> bool:
    """Whether its modules are those of a new model of its config, by which the kernels compute, read and write."""
    one_block = empty_model(replace(model.cfg, vit_n_blocks=1, lm_n_blocks=1), model.image_token_id)
    return len(model.decoder.blocks) == model.cfg.lm_n_blocks and _describe(model) == _describe(one_block)


def _describe(model: VisionLanguageModel) -> set[tuple]:
    """Type, numbers and parameters' sizes of the modules that the kernels read, by names that are equal in all blocks.

    Of a linear layer, in whatever format, it is the weight's size; a bias may be there or not, but of no other size.
    """
    modules: set[tuple] = set()
    layer: Any
    for name, layer in model.named_modules():
        details: tuple = nn.Linear, *getattr(getattr(layer, "weight", None), "shape", ())
        if getattr(layer, "format", None) in QUANTIZED:
            details = nn.Linear, layer.out_features, layer.in_features
        elif type(layer) is not nn.Linear:
            numbers = {key: value for key, value in vars(layer).items() if type(value) in (int, float, tuple)}
            sizes = {key: p.shape for key, p in layer.named_parameters(recurse=False)}
            details = type(layer), *sorted((numbers | sizes).items())
        if details[0] is nn.Linear and layer.bias is not None and layer.bias.shape != details[1:2]:
            details += (layer.bias.shape,)
        if name.startswith(("vision_encoder", "MP", "decoder")):
            modules.add((re.sub(r"blocks\.\d+", "", name), details))
    return modules


def empty_cache(network: Any, n_sequences: int, capacity: int) -> Tensor:
    """Zeros (n_blocks, 2, n_sequences, n_kv_heads, capacity, head_dim) for `run` of a KernelNetwork or PlainNetwork."""
    cfg = network.model.cfg
    shape = cfg.lm_n_blocks, 2, n_sequences, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim
    return torch.zeros(shape, dtype=network.cache_dtype, device=network.model.device)


class StackedCache(Sequence[KVCache]):
    """The caches of all blocks: the first `length` tokens of data (n_blocks, 2, B, n_kv_heads, capacity, head_dim).

    Like KVCache it is a value: `extend` returns a longer one, which shares the memory unless another continuation
    already took the place.
    """

    def __init__(self, data: Tensor, length: int, filled: list[int] | None = None):
        self.data, self.length = data, length
        self._filled = [length] if filled is None else filled  # tokens in data, for all caches that share it

    @classmethod
    def of(cls, kv_cache: Sequence[KVCache], like: Tensor, n: int) -> "StackedCache":
        """A copy of other caches, in the dtype and on the device of like, with capacity for n tokens more."""
        B, heads, length, D = kv_cache[0].key.shape
        data = like.new_empty(len(kv_cache), 2, B, heads, capacity_for(length + n), D)
        for block, kv in zip(data, kv_cache):
            block[0, :, :, :length], block[1, :, :, :length] = kv.key, kv.value
        return cls(data, length)

    def extend(self, n: int) -> "StackedCache":
        """A cache longer by n tokens, whose keys and values the caller writes into `data`."""
        fits = self._filled[0] == self.length and self.length + n <= self.data.size(4)
        if not fits or (self.data.is_inference() and not torch.is_inference_mode_enabled()):
            return StackedCache.of(self, self.data, n).extend(n)
        self._filled[0] = self.length + n
        return StackedCache(self.data, self.length + n, self._filled)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> KVCache:  # type: ignore[override]  # nobody asks for a slice of blocks
        key, value = self.data[index, :, :, :, : self.length]
        return KVCache(key, value)


class KernelNetwork:
    """Calls the kernels with a model's weights, which it reads where they are; norms and biases are copied to float32.

    `supports` says whether the kernels can compute a model. Activations are float32. Keys and values are stored in
    bfloat16 where the weights are and the CPU multiplies in it, else in float32: bfloat16 weights are then multiplied
    exactly.
    """

    def __init__(self, model: VisionLanguageModel):
        self.model, self.cfg = model, model.cfg
        level = chosen_level()
        library = None if level is None else load_library(level)
        assert level is not None and library is not None  # see supports
        self.level, self._library = level, library
        bf16 = model.dtype == torch.bfloat16 and level not in WITHOUT_BF16_DOT
        self.cache_dtype = torch.bfloat16 if bf16 else torch.float32
        self._packer = packer = Packer()
        self._decoder, self._projector = packer.decoder(model.decoder, model.cfg), packer.matrix(model.MP.proj)
        self._encoder = packer.encoder(model.vision_encoder, model.cfg, bf16)

    @staticmethod
    def supports(model: VisionLanguageModel) -> bool:
        """Whether the kernels compute what the model does: on this CPU, in its dtype, and of the core's own modules."""
        is_hooked = any(
            module._forward_hooks or module._forward_pre_hooks
            for part in (model.vision_encoder, model.MP, model.decoder)
            for module in part.modules()
        )
        methods = "encode_images", "embed_tokens", "prefill_embeds"
        is_overridden = any(getattr(type(model), name) is not getattr(VisionLanguageModel, name) for name in methods)
        tensors = [p for p in model.parameters() if p.is_floating_point()]
        fits = all(p.device.type == "cpu" and p.dtype in DTYPES for p in tensors) and model.cfg.vit_grid > 1
        computable = not (is_hooked or is_overridden) and fits and _has_modules_of_config(model)
        level = chosen_level() if computable else None
        return level is not None and load_library(level) is not None

    # ---------------------------------------------------------------------------------------------------- images

    def encode_images(self, images: Tensor) -> Tensor:
        """`VisionLanguageModel.encode_images`, to float32."""
        cfg = self.cfg
        if not len(images):
            return images.new_zeros(0, cfg.mp_image_token_length, cfg.lm_hidden_dim, dtype=torch.float32)
        parts = images.float().split(max(1, MAX_PATCHES // cfg.vit_grid**2))
        x = torch.cat([pixel_shuffle(self._encode(part), cfg.mp_pixel_shuffle_factor) for part in parts])
        return linear(self._library, self._projector, x)

    def _encode(self, images: Tensor) -> Tensor:
        """`VisionTransformer.forward`, to float32."""
        grid, size, S = self.cfg.vit_grid, self.cfg.vit_patch_size, self.cfg.vit_img_size
        if images.shape[1:] != (3, S, S):
            raise InputError(f"images have the shape {tuple(images.shape)}, not (N, 3, {S}, {S}): vit_img_size={S}")
        _check_device(images)
        whole = images[..., : grid * size, : grid * size]  # a patch cut off at the border is not computed
        patches = whole.reshape(len(images), 3, grid, size, grid, size).permute(0, 2, 4, 1, 3, 5).contiguous()
        out = patches.new_empty(len(images), grid**2, self.cfg.vit_hidden_dim)
        pointers = ctypes.byref(self._encoder), POINTER(patches.data_ptr())
        self._library.vision_forward(*pointers, LONG(len(images)), POINTER(out.data_ptr()), torch.get_num_threads())
        return out

    # --------------------------------------------------------------------------------------------------- decoder

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings (..., C) float32 of ids (...)."""
        return self.model.decoder.token_embedding(ids).float()

    def prefill_embeds(
        self, embeds: Tensor, attention_mask: Tensor | None, prefix: PrefillState | None
    ) -> tuple[Tensor, PrefillState]:
        """`VisionLanguageModel.prefill_embeds`; logits are float32."""
        mask = self.model.join_masks(embeds, attention_mask, prefix)
        (B, T, _), past = embeds.shape, 0 if prefix is None else prefix.length
        if past + T > (limit := self.cfg.lm_max_position_embeddings):
            raise InputError(f"{past + T} tokens exceed lm_max_position_embeddings={limit}; shorten the prompt")
        cache = self._extended(prefix, B, T)
        logits = self.run(embeds, cache.data, [past] * B, mask, [T - 1] * B)
        return logits, PrefillState(cache, mask)

    def run(
        self,
        x: Tensor,
        cache: Tensor,
        past: Sequence[int],
        mask: Tensor | None = None,
        last: Sequence[int] = (),
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """The decoder on embeddings x (B, T, C), new tokens of B sequences: logits (B, vocabulary) float32.

        cache (n_blocks, 2, slots, n_kv_heads, capacity, head_dim) holds `past` tokens of each sequence, in the slot of
        that number or in those named, and gets the new ones behind them. mask is that of `build_attention_mask`, for
        sequences of equal `past`; last says whose logits are computed, a new token of each sequence.
        """
        B, T, _ = x.shape
        _check_device(x)
        x = x.contiguous() if x.dtype in DTYPES else x.float().contiguous()
        numbers = past, range(B) if slots is None else slots, last
        past_lengths, places, last_tokens = (x.new_tensor(n, dtype=torch.long) for n in numbers)
        if mask is None:
            visible = None
            positions = past_lengths[:, None] + torch.arange(T, device=x.device)
        else:
            visible = build_attention_mask(mask, T)[:, 0]
            positions = visible.sum(-1) - 1
            visible = visible.expand(B, -1, -1).transpose(1, 2).to(torch.uint8).contiguous()
        positions = positions.contiguous()
        logits = x.new_empty(B, self.cfg.lm_vocab_size, dtype=torch.float32)
        step = DecoderStep(
            x.data_ptr(), DTYPES[x.dtype], B, T, places.data_ptr(), past_lengths.data_ptr(), positions.data_ptr(),
            None if visible is None else visible.data_ptr(), last_tokens.data_ptr(), cache.data_ptr(),
            DTYPES[cache.dtype], cache.size(4), *cache.stride()[:3], logits.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if B:  # the kernels divide the work by it
            self._library.decoder_forward(ctypes.byref(self._decoder), ctypes.byref(step))
        return logits

    def _extended(self, prefix: PrefillState | None, B: int, T: int) -> StackedCache:
        """The prefix's cache with place for T new tokens."""
        if prefix is None:
            return StackedCache(empty_cache(self, B, capacity_for(T)), 0).extend(T)
        kv_cache: Sequence[KVCache] = prefix.kv_cache
        if not isinstance(kv_cache, StackedCache) or kv_cache.data.dtype != self.cache_dtype:
            kv_cache = StackedCache.of(kv_cache, torch.empty(0, dtype=self.cache_dtype), T)
        n_blocks, _, n_sequences, heads, _, head_dim = kv_cache.data.shape
        if n_sequences != B:
            raise InputError(f"the prefix holds {n_sequences} sequences, but {B} are continued")
        sizes = self.cfg.lm_n_blocks, self.cfg.lm_n_kv_heads, self.cfg.lm_head_dim
        if (n_blocks, heads, head_dim) != sizes:  # the kernels would read and write beyond it
            raise InputError(f"the prefix has {n_blocks} blocks of {heads} heads of {head_dim}, but the model {sizes}")
        return kv_cache.extend(T)
