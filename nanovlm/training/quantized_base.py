"""LoRA over a quantized base, as QLoRA (Dettmers et al. 2023): frozen weights in 16, 8 or 4 bits, adapters in float32.

A weight is dequantized for each matmul, and again in the backward pass, which gives the gradient of the input alone.
Adapters are merged into the weights of the base model's folder, in float32, and not into the quantized ones.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.checkpoint import weight_files
from models.config import VLMConfig
from models.errors import CheckpointError
from models.inference.quantization import dequantize_weight, quantize_weight
from models.lora import LoRALinear
from models.vision_language_model import VisionLanguageModel

HEAD = "decoder.head"  # has no adapter


class QuantizedBaseLinear(nn.Linear):
    """A frozen linear layer in one of BASE_FORMATS; `adapt` makes a QuantizedLoRALinear of it.

    `weight` is bfloat16, or `data` as `models.inference.quantization` stores it, with scale or groups.
    """

    def __init__(self, linear: nn.Linear, format: str, read_original: Callable[[], Tensor]):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        weight = linear.weight.detach()
        stored = (weight.bfloat16(), None, None) if format == "bfloat16" else quantize_weight(weight, format)
        self.weight, self.bias = nn.Parameter(stored[0], requires_grad=False), linear.bias
        self._store(stored[1], stored[2], read_original)

    def _store(self, scale: Tensor | None, groups: Tensor | None, read_original: Callable[[], Tensor]) -> None:
        self.scale: Tensor | None
        self.groups: Tensor | None
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("groups", groups, persistent=False)
        self.base_weight = read_original  # gives (out, in) float32 on the CPU, as it was before

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight that the layer acts as, (out, in)."""
        if self.scale is None and self.groups is None:
            return self.weight.to(dtype)
        return dequantize_weight(self.weight, self.scale, self.groups, self.in_features).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) times the weight, plus the bias: (..., out)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Matmul.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def merged(self) -> Tensor:
        return self.base_weight()

    def with_adapter(self, rank: int, alpha: float) -> "QuantizedLoRALinear":
        return QuantizedLoRALinear(self, rank, alpha)


class QuantizedLoRALinear(QuantizedBaseLinear, LoRALinear):
    """A LoRALinear beside a quantized weight."""

    forward, merged, base_product = LoRALinear.forward, LoRALinear.merged, QuantizedBaseLinear.forward

    def __init__(self, linear: QuantizedBaseLinear, rank: int, alpha: float):
        LoRALinear.__init__(self, linear, rank, alpha, dtype=torch.float32)
        self._store(linear.scale, linear.groups, linear.base_weight)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedBaseLinear) -> Tensor:
        ctx.layer = layer  # and not its dequantized weight, which would stay in memory until the backward pass
        return F.linear(x, layer.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.dequantize(gradients[0].dtype), None


def quantize_base(model: VisionLanguageModel, format: str, folder: Path) -> VisionLanguageModel:
    """Store every linear layer but the head in one of BASE_FORMATS, and all else in float32. In place.

    Train LoRA adapters on it; folder is the model's own, from which they are merged.
    """
    read = partial(read_original, folder, model.cfg)
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != HEAD]
    quantized = set()
    for name in sorted(names, key=lambda name: name.split(".")[::-1]):  # as they are mapped, see read_state_dict
        parent, _, attribute = name.rpartition(".")
        linear: Any = model.get_submodule(name)
        layer = QuantizedBaseLinear(linear, format, partial(read, f"{name}.weight"))
        setattr(model.get_submodule(parent), attribute, layer)
        quantized.add(id(layer.weight))
    for p in model.parameters():
        if id(p) not in quantized:
            p.data = p.data.float()
    return model


def read_original(folder: Path, cfg: VLMConfig, name: str) -> Tensor:
    """One tensor of the model in folder, by its name in our models: float32, on the CPU."""
    joined = re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", name)  # in VisionPsy's files
    names = {*cfg.format.to_stored({name: torch.empty(3, 1)}), joined}
    found: dict[str, Tensor] = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt", device="cpu") as file:
                found |= {stored: file.get_tensor(stored).float() for stored in names & set(file.keys())}
        return cfg.format.from_stored(found, [name])[name]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: the base model, into which the adapters are merged, cannot be read: {error}; restore it and "
            "run the same command again to resume"
        ) from None


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, those of quantized weights included."""
    packed = [module for module in model.modules() if isinstance(module, QuantizedBaseLinear)]
    added = sum(module.in_features * module.out_features - module.weight.numel() for module in packed)
    return sum(p.numel() for p in model.parameters()) + added
