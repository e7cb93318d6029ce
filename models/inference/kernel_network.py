"""A VisionLanguageModel whose vision encoder and decoder run in the C kernels: packing structs, proof and calling."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
from models.inference.quantization import QuantizedLinear
from models.language_model import LanguageModel, build_attention_mask, rope_cos_sin
from models.modality_projector import pixel_shuffle
from models.vision_language_model import VisionLanguageModel
from models.vision_transformer import VisionTransformer

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # the numbers in common.h
QUANTIZED = {"int8": 2, "int4": 3}
MAX_PATCHES = 1024  # of images that are encoded together; activations of more leave the CPU's cache


class NoKernels(Exception):
    """A device, CPU, dtype or kind of layer that is known to have no kernels."""


class Unsupported(Exception):
    """A model that the kernels do not compute; the message says which part of it."""


class Packer:
    """Makes structs of tensors and layers, and keeps what they point to in memory.

    The kernels read by address, so every size is compared with the one that they will read: Unsupported if it differs.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def vector(self, x: Tensor | None, n: int) -> int | None:
        """The address of a vector (n,) in float32; None for None."""
        if x is None:
            return None
        self._check_shape("a vector", x, (n,))
        self.kept.append(x.detach().float().contiguous())
        return self.kept[-1].data_ptr()

    def dense(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Matrix:
        """The struct of a floating-point weight of this shape, (n_rows, depth)."""
        self._check_shape("a weight", weight, shape)
        if weight.dtype not in DTYPES:
            raise Unsupported(f"a weight is of {weight.dtype}")
        self.kept.append(weight := weight.detach().contiguous())
        return Matrix(
            weight.data_ptr(), None, None, self.vector(bias, shape[0]), *shape, shape[1], DTYPES[weight.dtype]
        )

    def matrix(self, layer: nn.Module, n_rows: int, depth: int) -> Matrix:
        """The struct of an nn.Linear or QuantizedLinear."""
        if type(layer) is nn.Linear:
            return self.dense(layer.weight, layer.bias, (n_rows, depth))
        if hasattr(layer, "lora_A"):  # in training, where modules are expected
            raise NoKernels
        if type(layer) is not QuantizedLinear:
            raise Unsupported(f"a layer is a {type(layer).__name__}")
        layer.check()
        self._check_shape(
            "a quantized weight", torch.empty(layer.out_features, layer.in_features, device="meta"), (n_rows, depth)
        )
        self.kept.append(layer)
        scale, groups = (None if x is None else x.data_ptr() for x in (layer.scale, layer.groups))
        size = n_rows, depth, layer.stride, QUANTIZED[layer.format]
        return Matrix(layer.data.data_ptr(), scale, groups, self.vector(layer.bias, n_rows), *size)

    def decoder(self, decoder: LanguageModel, cfg: VLMConfig) -> Decoder:
        """The struct of a decoder."""
        width, inner, heads = cfg.lm_hidden_dim, cfg.lm_inter_dim, cfg.lm_n_heads * cfg.lm_head_dim
        kv_heads = cfg.lm_n_kv_heads * cfg.lm_head_dim
        cos, sin = rope_cos_sin(torch.arange(cfg.lm_max_position_embeddings, device="cpu"), cfg)
        blocks = (DecoderBlock * len(decoder.blocks))()
        for packed, block in zip(blocks, decoder.blocks):
            attn, mlp = block.attn, block.mlp
            qkv = (attn.q_proj, heads), (attn.k_proj, kv_heads), (attn.v_proj, kv_heads)
            packed.qkv[:] = [self.matrix(layer, n_rows, width) for layer, n_rows in qkv]
            packed.gate_up[:] = [self.matrix(layer, inner, width) for layer in (mlp.gate_proj, mlp.up_proj)]
            packed.out, packed.down = self.matrix(attn.out_proj, width, heads), self.matrix(mlp.down_proj, width, inner)
            packed.norm1 = self.vector(block.norm1.weight, width)
            packed.norm2 = self.vector(block.norm2.weight, width)
        head = self.matrix(decoder.head, cfg.lm_vocab_size, width)
        self.kept += [blocks, head]
        pairs = cfg.lm_head_dim // 2
        angles = (self.vector(angle[:, :pairs].flatten(), angle[:, :pairs].numel()) for angle in (cos, sin))
        return Decoder(
            ctypes.addressof(blocks), ctypes.addressof(head), self.vector(decoder.norm.weight, width), *angles,
            len(blocks), width, inner, cfg.lm_n_heads, cfg.lm_n_kv_heads, cfg.lm_head_dim, decoder.norm.eps,
        )  # fmt: skip

    def encoder(self, encoder: VisionTransformer, cfg: VLMConfig, bf16: bool) -> VisionEncoder:
        """The struct of a vision encoder; bf16 says whether attention multiplies in bfloat16."""
        width, inner, n_patches = cfg.vit_hidden_dim, cfg.vit_inter_dim, cfg.vit_grid**2
        embedding = encoder.patch_embedding
        positions = embedding.position_embedding[0]
        positions = positions if embedding.position_ids is None else positions[embedding.position_ids]
        depth = 3 * cfg.vit_patch_size**2
        patch = self.dense(embedding.conv.weight.flatten(1), embedding.conv.bias, (width, depth))
        blocks = (VisionBlock * len(encoder.blocks))()
        for packed, block in zip(blocks, encoder.blocks):
            packed.qkv = self.matrix(block.attn.qkv_proj, 3 * width, width)
            packed.out = self.matrix(block.attn.out_proj, width, width)
            packed.fc1, packed.fc2 = self.matrix(block.mlp.fc1, inner, width), self.matrix(block.mlp.fc2, width, inner)
            packed.ln1, packed.ln1_bias = (self.vector(x, width) for x in (block.ln1.weight, block.ln1.bias))
            packed.ln2, packed.ln2_bias = (self.vector(x, width) for x in (block.ln2.weight, block.ln2.bias))
        self.kept += [blocks, patch]
        norm = encoder.layer_norm
        return VisionEncoder(
            ctypes.addressof(blocks), ctypes.addressof(patch), self.vector(positions.flatten(), n_patches * width),
            self.vector(norm.weight, width), self.vector(norm.bias, width), len(blocks), width, inner, cfg.vit_n_heads,
            n_patches, DTYPES[torch.bfloat16 if bf16 else torch.float32], norm.eps,
        )  # fmt: skip

    @staticmethod
    def _check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise Unsupported(f"{what} is {tuple(tensor.shape)}, not {shape}")
        if tensor.device.type not in ("cpu", "meta"):
            raise Unsupported(f"{what} is on {tensor.device}")


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

    Activations are float32. Keys and values are stored in bfloat16 where the weights are and the CPU multiplies in it,
    else in float32: bfloat16 weights are then multiplied exactly. Raises Unsupported for a model, or on a CPU, that
    the kernels were not written for (NoKernels); `proven_network` also tries whether they compute what the model does.
    """

    def __init__(self, model: VisionLanguageModel):
        self.model, self.cfg = model, model.cfg
        level = chosen_level() if model.device.type == "cpu" else None
        library = None if level is None else load_library(level)
        if level is None or library is None or model.dtype not in DTYPES:
            raise NoKernels
        self.level, self._library = level, library
        bf16 = model.dtype == torch.bfloat16 and level not in WITHOUT_BF16_DOT
        self.cache_dtype = torch.bfloat16 if bf16 else torch.float32
        self._packer = packer = Packer()
        cfg = model.cfg
        if (len(model.vision_encoder.blocks), len(model.decoder.blocks)) != (cfg.vit_n_blocks, cfg.lm_n_blocks):
            raise Unsupported("another number of blocks than the config's")
        if cfg.vit_grid == 1:
            raise Unsupported("a tile of one patch")
        self._decoder = packer.decoder(model.decoder, cfg)
        self._projector = packer.matrix(
            model.MP.proj, cfg.lm_hidden_dim, cfg.vit_hidden_dim * cfg.mp_pixel_shuffle_factor**2
        )
        self._encoder = packer.encoder(model.vision_encoder, cfg, bf16)

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
