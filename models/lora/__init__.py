"""LoRA (Hu et al. 2021): trainable low-rank matrices beside frozen weights."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.common.errors import InputError
from models.vision_language_model import VisionLanguageModel, empty_model

PARTS = ("vision_encoder", "MP", "decoder")
EMBEDDINGS = ("decoder.token_embedding", "decoder.head")


class LoRALinear(nn.Linear):
    """An nn.Linear whose weight W (out, in) acts as W + alpha / rank * lora_B @ lora_A; parameter names stay."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, **like)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as in PEFT
        nn.init.zeros_(self.lora_B.weight)  # an untrained adapter changes nothing
        self.rank = rank
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x)) * (self.alpha / self.rank)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The single weight (out, in) with the same effect, computed in float32 or better."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        delta = self.lora_B.weight.to(exact) @ self.lora_A.weight.to(exact) * (self.alpha / self.rank)
        return (self.weight + delta).to(self.weight.dtype)


def add_adapter(model: VisionLanguageModel, name: str, rank: int, alpha: float) -> None:
    """Give a linear layer an adapter."""
    parent, _, attribute = name.rpartition(".")
    linear = cast(nn.Linear, model.get_submodule(name))
    setattr(model.get_submodule(parent), attribute, LoRALinear(linear, rank, alpha))


def adapters(model: VisionLanguageModel) -> dict[str, LoRALinear]:
    """The model's adapters by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def fully_trained(model: VisionLanguageModel) -> dict[str, nn.Parameter]:
    """The trainable parameters that are not adapters, by name; a tied embedding and head appear under both names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if p.requires_grad and ".lora_" not in name}


def adapt(
    model: VisionLanguageModel, rank: int, alpha: float, parts: Collection[str] = PARTS, embeddings: bool = False
) -> None:
    """Freeze the model and add a trainable adapter to every Linear in `parts` except the head. In place.

    With `embeddings`, token embedding and head are trained in full if the decoder is one of the parts: rows of tokens
    that pretraining never saw are nearly equal, and no adapter between the two could tell such tokens apart.
    Raises InputError for a rank or parts that do not fit, and for a model with adapters.
    """
    if rank < 1:
        raise InputError(f"rank={rank} is less than 1")
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"{', '.join(sorted(unknown))}: not a part of the model; choose among {', '.join(PARTS)}")
    if adapters(model):
        raise InputError("the model has adapters already; merge them first")
    model.requires_grad_(False)
    linears = {
        name: min(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if name.split(".")[0] in parts and isinstance(module, nn.Linear) and name != "decoder.head"
    }
    if rank > (highest := max(linears.values(), default=rank)):
        raise InputError(f"rank={rank} is more than {highest}, the highest of this model's weights; lower it")
    for name in linears:
        add_adapter(model, name, rank, alpha)
    for name in EMBEDDINGS if embeddings and "decoder" in parts else ():
        model.get_submodule(name).requires_grad_(True)


def merged_state(model: VisionLanguageModel, consume: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The state dict of a model without adapters that computes the same, a tensor at a time.

    A merged weight is computed when it is asked for. With `consume` the model loses the weight of each layer with an
    adapter on the way, so that a second model takes no more memory; it cannot be used afterwards.
    """
    state = model.state_dict()
    for name in [*state]:
        tensor = state.pop(name)
        layer = model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and isinstance(layer, LoRALinear):
            yield name, layer.merged()
            if consume:
                layer.register_parameter("weight", None)
        elif ".lora_" not in name:
            yield name, tensor


def merge(model: VisionLanguageModel, consume: bool = False) -> VisionLanguageModel:
    """Return a model of `merged_state`; tensors without an adapter are shared, not copied."""
    return _plain(model, dict(merged_state(model, consume)))


def merge_on_disk(model: VisionLanguageModel, folder: Path, dtype: torch.dtype | None = None) -> VisionLanguageModel:
    """`merge` on the CPU, in dtype if given, whose weights are files of an empty folder, read when they are used.

    Beside a model that is trained, memory might not hold a second one. All are written before one is opened: small
    objects between large tensors would keep the memory of these from being used again.
    """
    for number, (name, weight) in enumerate(merged_state(model)):
        save_file({name: weight.to("cpu", dtype).contiguous()}, folder / str(number))
    return _plain(model, {name: weight for path in folder.iterdir() for name, weight in load_file(path).items()})


def _plain(model: VisionLanguageModel, state: dict[str, Tensor]) -> VisionLanguageModel:
    """A model like this one, but without adapters, of such a state dict."""
    plain = empty_model(model.cfg, model.image_token_id)
    plain.load_state_dict(state, assign=True)
    plain.decoder.tie_weights()
    return plain.train(model.training)
