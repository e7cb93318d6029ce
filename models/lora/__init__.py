"""LoRA (Hu et al. 2021): trainable low-rank matrices beside frozen weights; adapter files are PEFT's.

Those are adapter_config.json and adapter_model.safetensors.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoint import read_object
from models.errors import CheckpointError, InputError
from models.formats.base import format_of
from models.vision_language_model import VisionLanguageModel, empty_model

PARTS = ("vision_encoder", "MP", "decoder")
EMBEDDINGS = ("decoder.token_embedding", "decoder.head")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"  # subfolder of a folder that transformers reads
PREFIX = "base_model.model."  # of every tensor name in PEFT's files
ADAPTER_TENSORS = ("lora_A", "lora_B")


class LoRALinear(nn.Linear):
    """An nn.Linear whose weight W (out, in) acts as W + alpha / rank * lora_B @ lora_A; parameter names stay."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, **like)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as in PEFT
        nn.init.zeros_(self.lora_B.weight)  # an untrained adapter changes nothing
        self.rank, self.alpha = rank, alpha

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x)) * (self.alpha / self.rank)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The single weight (out, in) with the same effect."""
        return self.weight + self.lora_B.weight @ self.lora_A.weight * (self.alpha / self.rank)


def add_adapter(model: VisionLanguageModel, name: str, rank: int, alpha: float) -> None:
    """Give a linear layer an adapter."""
    parent, _, attribute = name.rpartition(".")
    linear = cast(nn.Linear, model.get_submodule(name))
    setattr(model.get_submodule(parent), attribute, LoRALinear(linear, rank, alpha))


def adapted_modules(names: Iterable[str]) -> list[str]:
    """The modules that adapters belong to, by the names of all tensors in a file."""
    return sorted({name.rpartition(".lora_")[0] for name in names if ".lora_" in name})


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
        name: module
        for name, module in model.named_modules()
        if name.split(".")[0] in parts and isinstance(module, nn.Linear) and name != "decoder.head"
    }
    highest = max((min(module.in_features, module.out_features) for module in linears.values()), default=rank)
    if rank > highest:
        raise InputError(f"rank={rank} is more than {highest}, the highest of this model's weights; lower it")
    for name in linears:
        add_adapter(model, name, rank, alpha)
    if embeddings and "decoder" in parts:
        for name in EMBEDDINGS:
            model.get_submodule(name).requires_grad_(True)


def merged_state(model: VisionLanguageModel, consume: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The state dict of a model without adapters that computes the same, a tensor at a time.

    A merged weight is computed when it is asked for. With `consume` the model loses the weight of each layer with an
    adapter on the way, so that a second model takes no more memory; it cannot be used afterwards.
    """
    state = model.state_dict()
    for name in [*state]:
        tensor, layer = state.pop(name), model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and isinstance(layer, LoRALinear):
            yield name, layer.merged()
            if consume:
                layer.register_parameter("weight", None)
        elif ".lora_" not in name:
            yield name, tensor


def merge(model: VisionLanguageModel, consume: bool = False) -> VisionLanguageModel:
    """Return a model of `merged_state`; tensors without an adapter are shared, not copied."""
    return _with_state(model, dict(merged_state(model, consume)))


def merge_on_disk(model: VisionLanguageModel, folder: Path, dtype: torch.dtype | None = None) -> VisionLanguageModel:
    """The same on the CPU, in dtype if given, whose weights are files of an empty folder, read when they are used.

    Beside a model that is trained, memory might not hold a second one. All are written before one is opened: small
    objects between large tensors would keep the memory of these from being used again.
    """
    for number, (name, weight) in enumerate(merged_state(model)):
        save_file({name: weight.to("cpu", dtype).contiguous()}, folder / str(number))
    return _with_state(model, {name: weight for path in folder.iterdir() for name, weight in load_file(path).items()})


def _with_state(model: VisionLanguageModel, state: dict[str, Tensor]) -> VisionLanguageModel:
    plain = empty_model(model.cfg, model.image_token_id)
    plain.load_state_dict(state, assign=True)
    plain.decoder.tie_weights()
    return plain.train(model.training)


# ------------------------------------------------------------------------------------------------- adapter files


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
    if format_of(model.cfg).for_transformers:
        (folder := folder / ADAPTER).mkdir()
        settings["task_type"] = "CAUSAL_LM"
    write_adapter_files(folder, model, adapter_tensors(model, format_of(model.cfg).to_stored), settings)


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
        "target_modules": adapted_modules(tensors),
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
        targets = [target.removesuffix(".weight") for target in format_of(model.cfg).to_stored({name: p})]
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


def read_adapters(folder: str | PathLike[str], model: VisionLanguageModel) -> None:
    """Load the adapters in folder, written by `write_adapters` or PEFT, into the model. In place.

    A model without adapters is frozen and adapted first; one with adapters must have the same. Raises CheckpointError
    for files that cannot be read or do not fit the model.
    """
    folder = adapter_folder(Path(folder))
    rank, alpha = _read_rank_and_alpha(folder / ADAPTER_CONFIG)
    state = _read_state(folder / ADAPTER_WEIGHTS, model)
    if not adapters(model):
        model.requires_grad_(False)
        for name in adapted_modules(state):
            add_adapter(model, name, rank, alpha)
        for name in state:
            if ".lora_" not in name:
                model.get_parameter(name).requires_grad_(True)
    for name, module in adapters(model).items():
        if (module.rank, module.alpha) != (rank, alpha):
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} has r={rank} and lora_alpha={alpha}, "
                f"but this model has {module.rank} and {module.alpha}; use the same, or train in another folder"
            )
        for part in ADAPTER_TENSORS:
            _load(getattr(module, part).weight, f"{name}.{part}.weight", state, folder)
    _load_fully_trained(folder, model, state)


def recorded_base(folder: Path) -> tuple[str | None, str | None]:
    """The name and the revision of the model that the adapters in folder were trained on, None if they do not say."""
    config = read_object(adapter_folder(folder) / ADAPTER_CONFIG)
    return config.get("base_model_name_or_path"), config.get("revision")


def _read_rank_and_alpha(path: Path) -> tuple[int, float]:
    """Rank and alpha of an adapter_config.json; CheckpointError for variants of LoRA that are not supported."""
    config = read_object(path)
    supported: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
    supported |= dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out"), False)
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
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    in_full = {key for key in state if ".lora_" not in key}
    if unknown := sorted({*adapted_modules(state)} - linears | in_full - parameters):
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
    if different := [name for name, p in parameters.items() if not torch.equal(p, state[name].to(p))]:
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
