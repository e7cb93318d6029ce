"""LoRA adapters beside a model's weights, for inference: several share one model, quantized or not."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import CheckpointError
from models.inference.inference_model import InferenceModel, share_modules
from models.inference.kernel_network import ADAPTED
from models.inference.quantization import QuantizedLinear
from models.lora import adapted_modules, read_adapter_files
from models.vision_language_model import VisionLanguageModel, empty_model

RANK_MULTIPLE = 32  # two vectors of AVX-512


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter: base(x) + x @ lora_a^T @ lora_b^T.

    lora_a is (rank, in) and lora_b (out, rank), alpha / rank included. They are padded with zeros to a rank that the
    kernels multiply by whole vectors.
    """

    format = ADAPTED

    def __init__(self, base: nn.Linear | QuantizedLinear, lora_a: Tensor, lora_b: Tensor):
        super().__init__()
        self.base = base
        pad = -lora_a.size(0) % RANK_MULTIPLE
        padded = F.pad(lora_a, (0, 0, 0, pad)), F.pad(lora_b, (0, pad))
        self.lora_a, self.lora_b = (nn.Parameter(x.contiguous(), requires_grad=False) for x in padded)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def with_adapter(model: VisionLanguageModel | InferenceModel, folder: str | PathLike[str]) -> InferenceModel:
    """The model with the adapters in folder beside its weights, which both share; what was trained in full is replaced.

    Equal to the merged adapters up to rounding. CheckpointError for files that cannot be read or do not fit the model.
    """
    model = model if isinstance(model, InferenceModel) else InferenceModel(model)
    source = model.network.model
    plain = empty_model(source.cfg, source.image_token_id)
    rank, alpha, state = read_adapter_files(Path(folder), plain)
    adapted: Any = share_modules(source)
    for name in adapted_modules(state):
        base: Any = plain.get_submodule(name)
        a, b = (state.pop(f"{name}.lora_{part}.weight", torch.empty(0)) for part in "AB")
        if (a.shape, b.shape) != ((rank, base.in_features), (base.out_features, rank)):
            raise CheckpointError(f"{folder}: the adapter of {name} has not rank {rank} and this layer's sizes")
        parent, _, attribute = name.rpartition(".")
        a, b = (x.to(source.device, source.dtype) for x in (a, b.float() * (alpha / rank)))
        setattr(adapted.get_submodule(parent), attribute, AdaptedLinear(adapted.get_submodule(name), a, b))
    for name, tensor in state.items():
        if tensor.shape != (shape := plain.get_parameter(name).shape):
            raise CheckpointError(f"{folder}: {name} is {tuple(tensor.shape)}, not {tuple(shape)}; train it again")
        _replace(adapted, name, tensor.to(source.device, source.dtype))
    return InferenceModel(adapted)


def _replace(model: VisionLanguageModel, name: str, tensor: Tensor) -> None:
    """Give one parameter another value, quantized if it was."""
    path, _, attribute = name.rpartition(".")
    parent, _, child = path.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(module, QuantizedLinear) and attribute == "weight":
        setattr(model.get_submodule(parent), child, QuantizedLinear(tensor, module.bias, module.format))
    else:
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
