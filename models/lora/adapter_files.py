"""Adapter files, which are PEFT's: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoint import read_object
from models.errors import CheckpointError
from models.lora.layers import adapters, add_adapter, fully_trained
from models.vision_language_model import VisionLanguageModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"  # subfolder of a folder that transformers reads
PREFIX = "base_model.model."  # of every tensor name in PEFT's files
ADAPTER_TENSORS = ("lora_A", "lora_B")


def adapter_folder(folder: Path) -> Path:
    """Where the adapters of a model's folder are: in its subfolder `adapter`, or else beside the model.

    They are in the subfolder if transformers reads the folder: it would add adapters beside the merged weights again.
    """
    return folder / ADAPTER if (folder / ADAPTER / ADAPTER_CONFIG).exists() else folder


def write_adapters(
    folder: Path, model: VisionLanguageModel, base: str | None = None, revision: str | None = None
) -> None:
    """Write everything that was trained as two files that PEFT loads; base, at revision, is the model trained on.

    Tensors have the names of the model's format. Beside a model that transformers reads, they are in a subfolder.
    """
    settings: dict[str, Any] = {"base_model_name_or_path": base, "revision": revision}
    if model.cfg.format.for_transformers:
        (folder := folder / ADAPTER).mkdir()
        settings["task_type"] = "CAUSAL_LM"
    write_adapter_files(folder, model, adapter_tensors(model, model.cfg.format.to_stored), settings)


def write_adapter_files(
    folder: Path, model: VisionLanguageModel, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Write adapter_config.json and adapter_model.safetensors: tensors by module name, and the model's rank and alpha.

    settings are further keys of adapter_config.json. Tensors of a tied pair are both written, as PEFT needs both.
    """
    first = next(iter(adapters(model).values()))
    config = {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name}) or None,
        "task_type": None,
        **settings,
    }
    (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = {f"{PREFIX}{name}": tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_file(state, Path(folder) / ADAPTER_WEIGHTS, {"format": "pt"})  # which refuses shared memory


def adapter_tensors(
    model: VisionLanguageModel, to_stored: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The adapters, and what was trained in full, under the names that a format's `to_stored` gives the weights.

    An adapter of a weight that is stored in parts, as q, k and v, becomes one for each: they share lora_A and get their
    rows of lora_B.
    """
    tensors = {}
    for name, module in adapters(model).items():
        for weight, lora_b in to_stored({f"{name}.weight": module.lora_B.weight}).items():
            target = weight.removesuffix(".weight")
            tensors[f"{target}.lora_A.weight"] = module.lora_A.weight
            tensors[f"{target}.lora_B.weight"] = lora_b
    return tensors | to_stored(fully_trained(model))


def _to_our_names(state: dict[str, Tensor], model: VisionLanguageModel, path: Path) -> dict[str, Tensor]:
    """The opposite; names that the format does not have stay. CheckpointError if parts of a weight share no lora_A."""
    ours: dict[str, Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        targets = [target.removesuffix(".weight") for target in model.cfg.format.to_stored({name: p})]
        if len(targets) == 1 and f"{targets[0]}.weight" in state:
            ours[name] = state.pop(f"{targets[0]}.weight")
        pairs = [[state.pop(f"{target}.{part}.weight", None) for target in targets] for part in ADAPTER_TENSORS]
        found_a, found_b = ([tensor for tensor in tensors if tensor is not None] for tensors in pairs)
        if not found_a and not found_b:
            continue
        if len(found_a) < len(targets) or any(not torch.equal(tensor, found_a[0]) for tensor in found_a):
            raise CheckpointError(f"{path}: the adapters of {', '.join(targets)} have no lora_A in common")
        module = name.removesuffix(".weight")
        ours[f"{module}.lora_A.weight"] = found_a[0]
        if found_b:
            ours[f"{module}.lora_B.weight"] = torch.cat(found_b)
    return ours | state


def read_adapters(folder: str | PathLike, model: VisionLanguageModel) -> None:
    """Load the adapters in folder, written by `write_adapters` or PEFT, into the model. In place.

    A model without adapters is frozen and adapted first; one with adapters must have the same. Raises CheckpointError
    for files that cannot be read or do not fit the model.
    """
    folder = adapter_folder(Path(folder))
    rank, alpha, state = read_adapter_files(folder, model)
    if not adapters(model):
        model.requires_grad_(False)
        for name in sorted({key.rpartition(".lora_")[0] for key in state if ".lora_" in key}):
            add_adapter(model, name, rank, alpha)
        for name in state:
            if ".lora_" not in name:
                model.get_parameter(name).requires_grad_(True)
    for name, module in adapters(model).items():
        if (module.rank, module.alpha) != (rank, alpha):
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} has r={rank} and lora_alpha={alpha}, "
                f"but this model has {module.rank} and {module.alpha}; use the same"
            )
        for part in ADAPTER_TENSORS:
            _load(getattr(module, part).weight, f"{name}.{part}.weight", state, folder)
    _load_fully_trained(folder, model, state)


def read_adapter_files(folder: Path, model: VisionLanguageModel) -> tuple[int, float, dict[str, Tensor]]:
    """Rank, alpha and the tensors of adapters in folder, by our names; CheckpointError if the model lacks one's module.

    The model may be on the meta device.
    """
    rank, alpha = _read_rank_and_alpha(adapter_folder(folder) / ADAPTER_CONFIG)
    return rank, alpha, _read_state(adapter_folder(folder) / ADAPTER_WEIGHTS, model)


def recorded_base(folder: Path) -> tuple[str | None, str | None]:
    """The name and the revision of the model that the adapters in folder were trained on, None if they do not say."""
    config = read_object(adapter_folder(folder) / ADAPTER_CONFIG)
    return config.get("base_model_name_or_path"), config.get("revision")


def _read_rank_and_alpha(path: Path) -> tuple[int, float]:
    """Rank and alpha of an adapter_config.json; CheckpointError for variants of LoRA that are not supported."""
    config = read_object(path)
    supported = {
        "peft_type": "LORA",
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for key, value in supported.items():
        if config.get(key, value) not in (value, None):
            raise CheckpointError(f"{path}: {key}={config[key]} is not supported, only {value}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise CheckpointError(f"{path}: r={rank} and lora_alpha={alpha} are not a rank and a factor")
    return rank, alpha


def _read_state(path: Path, model: VisionLanguageModel) -> dict[str, Tensor]:
    """The tensors of an adapter_model.safetensors without PEFT's prefix; CheckpointError for one the model lacks."""
    try:
        state = {key.removeprefix(PREFIX): tensor for key, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    state = _to_our_names(state, model, path)
    adapted = {key.rpartition(".lora_")[0] for key in state if ".lora_" in key}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = sorted((adapted - linears) | ({key for key in state if ".lora_" not in key} - parameters))
    if unknown:
        raise CheckpointError(f"{path} adapts {unknown[0]}, which this model does not have")
    return state


def _load_fully_trained(folder: Path, model: VisionLanguageModel, state: dict[str, Tensor]) -> None:
    """Load the parameters that were trained in full; CheckpointError unless they are the ones trained here."""
    parameters = fully_trained(model)
    extra = sorted({key for key in state if ".lora_" not in key} - parameters.keys())
    if extra:
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} holds {extra[0]}, which this model does not train")
    for name, p in parameters.items():
        _load(p, name, state, folder)
    different = [name for name, p in parameters.items() if not torch.equal(p, state[name].to(p))]
    if different:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS} has different weights for {different[0]} and its tied twin, but with "
            "lm_tie_weights=true embedding and head are one; train them so (PEFT: ensure_weight_tying=True)"
        )


def _load(p: nn.Parameter, key: str, state: dict[str, Tensor], folder: Path) -> None:
    """Copy a tensor of an adapter file into a parameter; CheckpointError if it is missing or of another shape."""
    if key not in state or state[key].shape != p.shape:
        shape = tuple(state[key].shape) if key in state else "missing"
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS}: {key} is {shape}, not {tuple(p.shape)}")
    with torch.no_grad():
        p.copy_(state[key])
