"""Adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

Modules have the names of the model's format: q, k and v of transformers' SigLIP are three adapters of our one qkv_proj.
"""

import json
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoint import format_of, open_tensors, read_object, why_unusable
from models.checkpoint.format import TIED
from models.common import files
from models.common.errors import CheckpointError
from models.lora import LoRALinear, adapters, add_adapter, fully_trained
from models.vision_language_model import VisionLanguageModel

Pair = tuple[Tensor, Tensor]  # lora_A (rank, in) and lora_B (out, rank)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = "adapter"  # subfolder of a folder that transformers reads
MAX_ALPHA = torch.finfo(torch.float32).max
PREFIX = "base_model.model."  # of every tensor name

# Keys of adapter_config.json that do not change what an adapter computes, or that are read below. Any other key must
# have one of the values in KNOWN, or else in OFF: PEFT 0.21 has twenty more kinds of LoRA.
FREE = {
    "r", "lora_alpha", "target_modules", "exclude_modules", "modules_to_save", "ensure_weight_tying", "lora_dropout",
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version",
    "megatron_core", "qalora_group_size",
}  # fmt: skip
OFF: tuple = (None, False, {}, [])
KNOWN: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),  # PiSSA, OLoRA, ... change the base weights
}


def adapter_folder(folder: Path) -> Path:
    """Where the adapters of a model's folder are: in its subfolder `adapter`, or else beside the model.

    They are in the subfolder if transformers reads the folder: it would add adapters beside the merged weights again.
    """
    return folder / ADAPTER if (folder / ADAPTER / ADAPTER_CONFIG).exists() else folder


def recorded_base(folder: Path) -> tuple[str | None, str | None]:
    """The name and the revision of the model that the adapters in folder were trained on, None if they do not say."""
    config = read_object(adapter_folder(folder) / ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path"), config.get("revision")
    for name in base:
        if not isinstance(name, str | None):
            raise CheckpointError(f"{folder}: {ADAPTER_CONFIG} names the base model {name!r}, which is no text")
    return base


def write_adapters(folder: Path, model: VisionLanguageModel, base: str | None = None) -> None:
    """Write everything that was trained as two files that PEFT loads; base is the model trained on.

    Tensors have the names of the model's format. Beside a model that transformers reads, they are in a subfolder.
    """
    format = format_of(model.cfg)
    settings = {"base_model_name_or_path": base}
    if format.for_transformers:
        (folder := folder / ADAPTER).mkdir()
        settings["task_type"] = "CAUSAL_LM"
    write_adapter_files(folder, model, format.to_stored, settings)


def write_adapter_files(
    folder: Path,
    model: VisionLanguageModel,
    to_stored: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    settings: Mapping[str, Any],
) -> None:
    """Write the adapters, and what was trained in full, under the names that a format's `to_stored` gives the weights.

    settings are further keys of adapter_config.json. An adapter of a weight that is stored in parts becomes one for
    each: they share lora_A and get their rows of lora_B. Of a tied pair both are written, as PEFT needs both.
    """
    in_full = to_stored(fully_trained(model))
    targets = []
    tensors = dict(in_full)
    for name, module in adapters(model).items():
        for weight, lora_b in to_stored({f"{name}.weight": module.lora_B.weight}).items():
            targets.append(target := weight.removesuffix(".weight"))
            tensors |= {f"{target}.lora_A.weight": module.lora_A.weight, f"{target}.lora_B.weight": lora_b}
    config = {
        "peft_type": "LORA", "r": module.rank, "lora_alpha": module.alpha, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "target_modules": sorted(targets), "task_type": None,
        "modules_to_save": sorted(name.rpartition(".")[0] for name in in_full) or None, **settings,
    }  # fmt: skip
    files.replace(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
    state = {f"{PREFIX}{name}": tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_file(state, folder / ADAPTER_WEIGHTS, {"format": "pt"})  # which refuses shared memory


@torch.no_grad()
def read_adapters(folder: str | PathLike[str], model: VisionLanguageModel) -> None:
    """Load the adapters in folder, written by `write_adapters` or PEFT, into the model. In place.

    A model without adapters is frozen and adapted first; one with adapters must have the same. Raises CheckpointError
    for files that cannot be read, do not fit the model, or hold another kind of adapter than LoRA (Hu et al. 2021).
    """
    folder = adapter_folder(Path(folder))
    path = folder / ADAPTER_WEIGHTS
    config = _read_config(folder / ADAPTER_CONFIG)
    state = _read_tensors(path, model.dtype)
    known = adapters(model)
    format = format_of(model.cfg)
    if not known:
        model.requires_grad_(False)
    for name, linear in [*model.named_modules()]:
        if not isinstance(linear, nn.Linear) or ".lora_" in name:
            continue
        parts = format.to_stored({f"{name}.weight": linear.weight})
        lora_a, lora_b = _joined([_take_pair(state, weight, rows, config, path) for weight, rows in parts.items()])
        if not len(lora_a) and name not in known:
            continue
        if model.cfg.lm_tie_weights and f"{name}.weight" in TIED:
            raise CheckpointError(f"{path} adapts the head, which is the token embedding, too; untie them in the model")
        rank = len(lora_a)
        alpha = config["lora_alpha"] * (len(lora_a) / config["r"])
        if not known:
            add_adapter(model, name, rank, alpha)
        layer = cast(LoRALinear, model.get_submodule(name))
        if (layer.rank, layer.alpha) != (rank, alpha):
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} has r={rank} and lora_alpha={alpha}, but this model has {layer.rank} and "
                f"{layer.alpha}; use the same, or train in another folder"
            )
        layer.lora_A.weight.copy_(lora_a)
        layer.lora_B.weight.copy_(lora_b)
    if adapted := sorted(name for name in state if ".lora_" in name):
        raise CheckpointError(f"{path} adapts {adapted[0].partition('.lora_')[0]}, which this model does not have")
    _load_in_full(model, state, path, bool(known))


def _read_config(path: Path) -> dict:
    """The object in an adapter_config.json; CheckpointError for a setting of which we would compute something else."""
    config = read_object(path)
    for key, value in config.items():
        values = KNOWN.get(key, OFF)
        if key not in FREE and value not in values:
            raise CheckpointError(f"{path}: {key}={value!r} is not supported, only {values[0]!r}")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
        raise CheckpointError(f"{path}: r={rank} and lora_alpha={alpha} are not a rank and a factor")
    for key in ("target_modules", "exclude_modules"):
        targets = config.get(key)
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except (re.error, OverflowError, RecursionError) as error:
                raise CheckpointError(f"{path}: {key}={targets!r} is no regular expression: {error}") from None
        elif targets is not None and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
            raise CheckpointError(f"{path}: {key}={targets!r} is neither a text nor a list of texts")
    return config


def _read_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of an adapter_model.safetensors without PEFT's prefix; CheckpointError unless they can be weights."""
    state: dict[str, Tensor] = {}
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            tensor = file.get_tensor(name)
            state[name.removeprefix(PREFIX).replace(".base_layer.", ".")] = tensor  # PEFT adds it for an adapted head
            if reason := why_unusable(tensor, dtype):
                raise CheckpointError(f"{path}: {name} {reason}")
    return state


def _take_pair(state: dict[str, Tensor], weight: str, rows: Tensor, config: dict, path: Path) -> Pair:
    """Remove the adapter of a stored weight (out, in) from state; of rank 0 if it has none, and needs none."""
    target = weight.removesuffix(".weight")
    rank = config["r"]
    pair = [state.pop(f"{target}.{part}.weight", None) for part in ("lora_A", "lora_B")]
    if all(tensor is None for tensor in pair) and not is_target(target, config):
        return rows.new_empty(0, rows.size(1)), rows.new_empty(len(rows), 0)
    for part, tensor, shape in zip(("lora_A", "lora_B"), pair, ((rank, rows.size(1)), (len(rows), rank))):
        if tensor is None or tensor.shape != shape:
            found = "missing" if tensor is None else tuple(tensor.shape)
            raise CheckpointError(f"{path}: {target}.{part}.weight is {found}, not {shape}")
    return cast(Pair, tuple(pair))


def is_target(module: str, config: dict) -> bool:
    """Check whether adapter_config.json names a layer, in one of PEFT's ways: names, ends of names or a regex."""

    def matches(names: Any) -> bool:
        if isinstance(names, str):
            return re.fullmatch(names, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names or ())

    return matches(config.get("target_modules")) and not matches(config.get("exclude_modules"))


def _joined(pairs: list[Pair]) -> Pair:
    """One adapter of weights that are the rows of one: they keep a common lora_A, or have the sum of their ranks."""
    first = pairs[0][0]
    if all(torch.equal(lora_a, first) for lora_a, _ in pairs):
        return first, torch.cat([lora_b for _, lora_b in pairs])
    return torch.cat([lora_a for lora_a, _ in pairs]), torch.block_diag(*(lora_b for _, lora_b in pairs))


def _load_in_full(model: VisionLanguageModel, state: dict[str, Tensor], path: Path, is_adapted: bool) -> None:
    """Copy what was trained in full into the model; CheckpointError unless a model with adapters trains the same."""
    format = format_of(model.cfg)
    if model.cfg.lm_tie_weights and not state.keys().isdisjoint(format.tied):
        first, second = (state.get(name) for name in format.tied)
        if first is None or second is None or not torch.equal(first, second):
            raise CheckpointError(
                f"{path} has different weights for {' and '.join(format.tied)}, or one alone, but in this model they "
                "are tied; train them so (PEFT: ensure_weight_tying=True)"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = {} if ".lora_" in name else format.to_stored({name: parameter.data})
        found = [weight for weight in parts if weight in state]
        if is_adapted and bool(found) != (parameter.requires_grad and bool(parts)):
            reason = "which this model does not train" if found else "is missing"
            raise CheckpointError(f"{path}: {found[0] if found else next(iter(parts))} {reason}")
        for weight in found:
            if (tensor := state.pop(weight)).shape != parts[weight].shape:
                raise CheckpointError(f"{path}: {weight} is {tuple(tensor.shape)}, not {tuple(parts[weight].shape)}")
            parts[weight].copy_(tensor)
            parameter.requires_grad_(True)
    if state:
        raise CheckpointError(f"{path} holds {min(state)}, which this model does not have")
