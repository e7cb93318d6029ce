"""A VisionLanguageModel whose vision encoder and decoder run in the C kernels: packing its weights, and calling."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.common.errors import InputError
from models.config import VLMConfig
from models.decoding import GenerationMixin
from models.inference.kernels.load import WITHOUT_BF16_DOT, read_structs
from models.inference.quantization import KERNEL_DTYPES as DTYPES
from models.inference.quantization import QuantizedLinear, find_library
from models.language_model import LanguageModel, rope_cos_sin
from models.modality_projector import pixel_shuffle
from models.vision_language_model import VisionLanguageModel
from models.vision_transformer import VisionTransformer

QUANTIZED = {"int8": 2, "int4": 3}
MAX_PATCHES = 1024  # of images that are encoded together; activations of more leave the CPU's cache
STRUCTS = read_structs()
POINTER: Any = ctypes.c_void_p
LONG: Any = ctypes.c_long


class Packer:
    """Makes structs of layers, and keeps what they point to in memory.

    The kernels read by address, so every size is compared with the one that they will read: ValueError if it differs.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def address(self, x: Tensor, *shape: int) -> int:
        """The address of a tensor of this shape, or of a contiguous copy."""
        if tuple(x.shape) != shape or x.device.type != "cpu":
            raise ValueError(f"a weight is {tuple(x.shape)} on {x.device}, not {shape} on cpu")
        self.kept.append(x.detach().contiguous())
        return self.kept[-1].data_ptr()

    def vector(self, x: Tensor, n: int) -> int:
        """The address of a norm's or bias's n values in float32."""
        return self.address(x.float(), n)

    def structs(self, items: Sequence[Any]) -> int:
        """The address of an array of structs."""
        self.kept.append((type(items[0]) * len(items))(*items))
        return ctypes.addressof(self.kept[-1])

    def matrix(self, layer: Any, n_rows: int, depth: int) -> Any:
        """The struct of an nn.Linear, a QuantizedLinear, or an nn.Conv2d of patches."""
        bias = None if layer.bias is None else self.vector(layer.bias, n_rows)
        if type(layer) is QuantizedLinear:
            layer.check()
            if (layer.out_features, layer.in_features) != (n_rows, depth):
                raise ValueError(f"a quantized weight is not {(n_rows, depth)}")
            data = {name: self.address(x, *x.shape) for name, x in layer.named_parameters() if name != "bias"}
            stride = layer.stride
            dtype = QUANTIZED[layer.format]
        elif type(layer) in (nn.Linear, nn.Conv2d):
            data = {"data": self.address(layer.weight.flatten(1), n_rows, depth)}
            stride = depth
            dtype = DTYPES[layer.weight.dtype]
        else:
            raise ValueError(f"a layer is a {type(layer).__name__}")
        return STRUCTS["matrix"](**data, bias=bias, n_rows=n_rows, depth=depth, stride=stride, dtype=dtype)

    def decoder(self, decoder: LanguageModel, cfg: VLMConfig) -> Any:
        """The struct of a decoder."""
        width = cfg.lm_hidden_dim
        inner = cfg.lm_inter_dim
        heads = cfg.lm_n_heads * cfg.lm_head_dim
        kv_heads = cfg.lm_n_kv_heads * cfg.lm_head_dim
        blocks = []
        for block in decoder.blocks:
            attn = block.attn
            mlp = block.mlp
            qkv = (attn.q_proj, heads), (attn.k_proj, kv_heads), (attn.v_proj, kv_heads)
            packed = STRUCTS["decoder_block"](
                qkv=tuple(self.matrix(layer, n_rows, width) for layer, n_rows in qkv),
                gate_up=tuple(self.matrix(layer, inner, width) for layer in (mlp.gate_proj, mlp.up_proj)),
                out=self.matrix(attn.out_proj, width, heads), down=self.matrix(mlp.down_proj, width, inner),
                norm1=self.vector(block.norm1.weight, width), norm2=self.vector(block.norm2.weight, width),
            )  # fmt: skip
            blocks.append(packed)
        return STRUCTS["decoder"](
            blocks=self.structs(blocks), head=self.structs([self.matrix(decoder.head, cfg.lm_vocab_size, width)]),
            norm=self.vector(decoder.norm.weight, width), eps=decoder.norm.eps,
            n_blocks=len(blocks), hidden_dim=width, inter_dim=inner,
            n_heads=cfg.lm_n_heads, n_kv_heads=cfg.lm_n_kv_heads, head_dim=cfg.lm_head_dim,
        )  # fmt: skip

    def encoder(self, encoder: VisionTransformer, cfg: VLMConfig, dtype: torch.dtype) -> Any:
        """The struct of a vision encoder; dtype is that in which attention multiplies."""
        width = cfg.vit_hidden_dim
        inner = cfg.vit_inter_dim
        n_patches = cfg.vit_grid**2
        embedding = encoder.patch_embedding
        norm = encoder.layer_norm
        positions = embedding.position_embedding[0]
        if embedding.position_ids is not None:
            positions = positions[embedding.position_ids]
        blocks = []
        for block in encoder.blocks:
            packed = STRUCTS["vision_block"](
                qkv=self.matrix(block.attn.qkv_proj, 3 * width, width),
                out=self.matrix(block.attn.out_proj, width, width),
                fc1=self.matrix(block.mlp.fc1, inner, width), fc2=self.matrix(block.mlp.fc2, width, inner),
                ln1=self.vector(block.ln1.weight, width), ln1_bias=self.vector(block.ln1.bias, width),
                ln2=self.vector(block.ln2.weight, width), ln2_bias=self.vector(block.ln2.bias, width),
            )  # fmt: skip
            blocks.append(packed)
        return STRUCTS["vision_encoder"](
            blocks=self.structs(blocks),
            patch=self.structs([self.matrix(embedding.conv, width, 3 * cfg.vit_patch_size**2)]),
            position=self.address(positions.float(), n_patches, width),
            norm=self.vector(norm.weight, width), norm_bias=self.vector(norm.bias, width), eps=norm.eps,
            n_blocks=len(blocks), hidden_dim=width, inter_dim=inner, n_heads=cfg.vit_n_heads,
            n_patches=n_patches, dtype=DTYPES[dtype],
        )  # fmt: skip


def linear(library: ctypes.CDLL, matrix: Any, x: Tensor) -> Tensor:
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
    """Zeros (n_blocks, 2, n_sequences, n_kv_heads, capacity, head_dim) for a KernelNetwork or PlainNetwork."""
    cfg = network.model.cfg
    shape = len(network.model.decoder.blocks), 2, n_sequences, cfg.lm_n_kv_heads, capacity, cfg.lm_head_dim
    return torch.zeros(shape, dtype=network.cache_dtype, device=network.model.device)


class KernelNetwork:
    """Calls the kernels with a model's weights, which it reads where they are; norms and biases are copied to float32.

    Activations are float32. Keys and values are stored in bfloat16 where the weights are and the CPU multiplies in it,
    else in float32: bfloat16 weights are then multiplied exactly. The model is one that `find_library` has kernels for
    and in which `models.inference.proof` finds no difference.
    """

    def __init__(self, model: VisionLanguageModel):
        self.model = model
        self.cfg = model.cfg
        self.image_token_id = model.image_token_id
        self.is_edited = False
        found = find_library(model)
        if found is None:
            raise InputError(f"there are no kernels for {model.dtype} on this {model.device.type}")
        self.level, self._library = found
        cfg = model.cfg
        self.cache_dtype = torch.float32 if self.level in WITHOUT_BF16_DOT else model.dtype
        self._packer = packer = Packer()
        self._decoder = packer.decoder(model.decoder, cfg)
        depth = cfg.vit_hidden_dim * cfg.mp_pixel_shuffle_factor**2
        self._projector = packer.matrix(model.MP.proj, cfg.lm_hidden_dim, depth)
        self._encoder = packer.encoder(model.vision_encoder, cfg, self.cache_dtype)
        angles = rope_cos_sin(torch.arange(cfg.lm_max_position_embeddings, device="cpu"), cfg)
        self._angles = torch.cat([x[:, : cfg.lm_head_dim // 2] for x in angles], dim=1)  # (positions, head_dim)

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
        grid = self.cfg.vit_grid
        size = self.cfg.vit_patch_size
        S = self.cfg.vit_img_size
        if images.shape[1:] != (3, S, S):
            raise InputError(f"images have the shape {tuple(images.shape)}, not (N, 3, {S}, {S}): vit_img_size={S}")
        _check_device(images)
        whole = images[..., : grid * size, : grid * size]  # a patch cut off at the border is not computed
        patches = whole.reshape(len(images), 3, grid, size, grid, size).permute(0, 2, 4, 1, 3, 5).contiguous()
        out = patches.new_empty(len(images), grid**2, self.cfg.vit_hidden_dim)
        pointers = ctypes.byref(self._encoder), POINTER(patches.data_ptr())
        self._library.vision_forward(*pointers, LONG(len(images)), POINTER(out.data_ptr()), torch.get_num_threads())
        return out

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings (..., C) float32 of ids (...)."""
        return self.model.decoder.token_embedding(ids).float()

    embed_encoded: Any = GenerationMixin.embed_encoded  # with this class's embed_tokens

    def prefill(self, rows: Sequence[Tensor], cache: Tensor, start: int, slots: Sequence[int]) -> Tensor:
        """Logits (B, vocabulary) after embeddings (T, C) of each sequence, behind `start` tokens of its slot in cache.

        Padding is on the right, where causal attention ignores it.
        """
        x = torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True)
        return self.run(x, cache, [start] * len(rows), [len(row) - 1 for row in rows], slots)

    def decode_tokens(self, ids: Tensor, cache: Tensor, past: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Logits (B, vocabulary) after ids (B, T), behind `past` tokens of each slot."""
        return self.run(self.embed_tokens(ids), cache, past, [ids.size(1) - 1] * len(ids), slots)

    def run(self, x: Tensor, cache: Tensor, past: Sequence[int], last: Sequence[int], slots: Sequence[int]) -> Tensor:
        """The decoder on embeddings x (B, T, C), new tokens of B sequences: logits (B, vocabulary) float32.

        cache (n_blocks, 2, slots, n_kv_heads, capacity, head_dim) holds `past` tokens of each sequence, in the slot of
        that number, and gets the new ones behind them. last says whose logits are computed, a new token of each
        sequence.
        """
        B, T, width = x.shape
        _check_device(x)
        cfg = self.cfg
        wanted = cfg.lm_n_blocks, 2, cache.size(2), cfg.lm_n_kv_heads, cache.size(4), cfg.lm_head_dim
        fits = tuple(cache.shape) == wanted and all(0 <= slot < cache.size(2) for slot in slots)
        if width != cfg.lm_hidden_dim or not T or not fits or max(past) + T > cache.size(4):
            raise InputError(f"{tuple(x.shape)} new tokens behind {max(past)} do not fit a cache of {wanted}")
        logits = x.new_empty(B, cfg.lm_vocab_size, dtype=torch.float32)
        x = (x if x.dtype in DTYPES else x.float()).contiguous()
        angles = self._angles[past] if T == 1 else torch.cat([self._angles.narrow(0, n, T) for n in past])
        sequences = (STRUCTS["sequence"] * B)(*zip(slots, past, last))
        block_stride, part_stride, sequence_stride, *_ = cache.stride()
        step = STRUCTS["decoder_step"](
            x=x.data_ptr(), x_dtype=DTYPES[x.dtype], n_sequences=B, n_new=T, sequences=ctypes.addressof(sequences),
            angles=angles.data_ptr(), cache=cache.data_ptr(), cache_dtype=DTYPES[cache.dtype], capacity=cache.size(4),
            block_stride=block_stride, part_stride=part_stride, sequence_stride=sequence_stride,
            logits=logits.data_ptr(), threads=torch.get_num_threads(),
        )  # fmt: skip
        self._library.decoder_forward(ctypes.byref(self._decoder), ctypes.byref(step))
        return logits
