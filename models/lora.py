"""LoRA (Hu et al. 2021): a low-rank matrix learns beside each frozen one; files of adapters are PEFT's."""

import json
import math
from collections.abc import Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoint import read_object
from models.errors import CheckpointError
from models.vision_language_model import VisionLanguageModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # before each of our names, in PEFT's files
PARTS = ("vision_encoder", "MP", "decoder")
WORDS = ("decoder.token_embedding", "decoder.head")


class LoRALinear(nn.Linear):
    """A Linear under its own names, whose weight W (out, in) acts as W + alpha / rank * lora_B @ lora_A."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        where = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, **where)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, **where)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as PEFT
        nn.init.zeros_(self.lora_B.weight)  # so that, at first, nothing is added
        self.rank, self.alpha = rank, alpha

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y + self.lora_B(self.lora_A(x)) * (self.alpha / self.rank)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The one weight (out, in) that does the same."""
        return self.weight + self.lora_B.weight @ self.lora_A.weight * (self.alpha / self.rank)


def _replace(model: VisionLanguageModel, name: str, rank: int, alpha: float) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, LoRALinear(model.get_submodule(name), rank, alpha))


def adapters(model: VisionLanguageModel) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def learning_whole(model: VisionLanguageModel) -> dict[str, nn.Parameter]:
    """What learns beside the adapters, by name; one parameter that is embedding and head has both names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if p.requires_grad and ".lora_" not in name}


def adapt(
    model: VisionLanguageModel, rank: int, alpha: float, parts: Collection[str] = PARTS, words: bool = False
) -> None:
    """Freeze model and give every Linear in these parts of it an adapter that learns; but for the head, the last.

    words lets embedding and head learn in full, if the decoder is one of the parts: the rows of tokens that training
    never met are nearly alike there, and nothing that goes on between the two can tell them apart.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} is less than 1")
    if wrong := set(parts) - set(PARTS):
        raise ValueError(f"{', '.join(sorted(wrong))}: no part of the model; choose among {', '.join(PARTS)}")
    if adapters(model):
        raise ValueError("the model has adapters already; merge them first")
    model.requires_grad_(False)
    named = [(name, module) for name, module in model.named_modules() if name.split(".")[0] in parts]
    linear = {name: module for name, module in named if isinstance(module, nn.Linear) and name != "decoder.head"}
    if linear and rank > (most := max(min(module.weight.shape) for module in linear.values())):
        raise ValueError(f"rank={rank} is more than {most}, the highest that a weight of this model has; lower it")
    for name in linear:
        _replace(model, name, rank, alpha)
    for name in WORDS if words and "decoder" in parts else ():
        model.get_submodule(name).requires_grad_(True)


def merge(model: VisionLanguageModel) -> VisionLanguageModel:
    """A plain model that says what model says with its adapters; all that has none is shared, not copied."""
    found = adapters(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    state |= {f"{name}.weight": module.merged() for name, module in found.items()}
    with torch.device("meta"):
        plain = VisionLanguageModel(model.cfg, model.image_token_id)
    plain.load_state_dict(state, assign=True)
    plain.decoder.tie_weights()
    return plain.train(model.training)


def write_adapters(folder: Path, model: VisionLanguageModel, base: str | None = None) -> None:
    """Write all that learnt and no more, two files, so that PEFT loads it onto this model; base says whose it is."""
    found, whole = adapters(model), learning_whole(model)
    one = next(iter(found.values()))
    told = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": one.rank,
        "lora_alpha": one.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(found),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
        "task_type": None,
    }
    (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    state = {
        f"{PREFIX}{name}.{half}.weight": getattr(module, half).weight.detach().cpu().contiguous()
        for name, module in found.items()
        for half in ("lora_A", "lora_B")
    }
    for name, p in whole.items():
        state[f"{PREFIX}{name}"] = p.detach().cpu().clone()  # PEFT wants both of a tied pair, safetensors no twins
    save_file(state, Path(folder) / ADAPTER_WEIGHTS, {"format": "pt"})


def read_adapters(folder: Path, model: VisionLanguageModel) -> None:
    """Give model the adapters in folder, written here or by PEFT; all that is wrong with them is a CheckpointError.

    A model with adapters takes these in their place, and they must fit; one without is frozen and adapted first.
    """
    folder = Path(folder)
    told = read_object(folder / ADAPTER_CONFIG)
    odd = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}
    odd |= {"rank_pattern": {}, "alpha_pattern": {}}
    for key, plain in odd.items():
        if told.get(key, plain) not in (plain, None):
            raise CheckpointError(f"{folder / ADAPTER_CONFIG}: {key}={told[key]} is not supported, only {plain}")
    try:
        state = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from None
    state = {key.removeprefix(PREFIX): tensor for key, tensor in state.items()}
    halves = {key for key in state if ".lora_" in key}
    names = {key.rpartition(".lora_")[0] for key in halves}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plain = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if wrong := sorted((names - linear) | (state.keys() - halves - plain)):
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} adapts {wrong[0]}, which this model has not")
    rank, alpha = told.get("r"), told.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: r={rank} and lora_alpha={alpha} are no rank and no factor")
    if not adapters(model):
        model.requires_grad_(False)
        for name in sorted(names):
            _replace(model, name, rank, alpha)
        for name in state.keys() - halves:
            model.get_parameter(name).requires_grad_(True)
    for name, module in adapters(model).items():
        if (module.rank, module.alpha) != (rank, alpha):
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} has r={rank} and lora_alpha={alpha}, "
                f"but this model has {module.rank} and {module.alpha}; use the same"
            )
        for half in ("lora_A", "lora_B"):
            _load(getattr(module, half).weight, f"{name}.{half}.weight", state, folder)
    whole = learning_whole(model)
    if extra := sorted(state.keys() - halves - whole.keys()):
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} holds {extra[0]}, which this model does not learn")
    for name, p in whole.items():
        _load(p, name, state, folder)
    if apart := [name for name, p in whole.items() if not torch.equal(p, state[name].to(p))]:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS} holds another {apart[0]} than its twin, but with lm_tie_weights=true "
            "embedding and head are one; train them so (PEFT: ensure_weight_tying=True)"
        )


def _load(p: nn.Parameter, key: str, state: dict[str, Tensor], folder: Path) -> None:
    """Fill a parameter of the model from an adapter's file."""
    if key not in state or state[key].shape != p.shape:
        found = tuple(state[key].shape) if key in state else "missing"
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS}: {key} is {found}, not {tuple(p.shape)}")
    with torch.no_grad():
        p.copy_(state[key])
