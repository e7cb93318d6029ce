"""LoRA (Hu et al. 2021): trainable low-rank matrices beside frozen weights; adapter files are PEFT's."""

import json
import math
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoint import read_object
from models.errors import CheckpointError, InputError
from models.formats.smolvlm import to_smolvlm
from models.vision_language_model import VisionLanguageModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"  # subfolder of a folder that transformers reads
PREFIX = "base_model.model."  # of every tensor name in PEFT's files
PARTS = ("vision_encoder", "MP", "decoder")
EMBEDDINGS = ("decoder.token_embedding", "decoder.head")
ADAPTER_TENSORS = ("lora_A", "lora_B")


class LoRALinear(nn.Linear):
    """An nn.Linear whose weight W (out, in) acts as W + alpha / rank * lora_B @ lora_A; parameter names stay."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dtype: torch.dtype | None = None):
        nn.Linear.__init__(self, linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": dtype or linear.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, **like)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as in PEFT
        nn.init.zeros_(self.lora_B.weight)  # an untrained adapter changes nothing
        self.rank, self.alpha = rank, alpha

    def forward(self, x: Tensor) -> Tensor:
        return self.base_product(x) + self.lora_B(self.lora_A(x)) * (self.alpha / self.rank)

    def base_product(self, x: Tensor) -> Tensor:
        """The output without the adapter."""
        return F.linear(x, self.weight, self.bias)

    def base_weight(self) -> Tensor:
        """The weight (out, in) that the adapter is merged into."""
        return self.weight

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The single weight (out, in) with the same effect, where base_weight is."""
        weight = self.base_weight()
        return weight + (self.lora_B.weight @ self.lora_A.weight * (self.alpha / self.rank)).to(weight.device)


def _replace(model: VisionLanguageModel, name: str, rank: int, alpha: float) -> None:
    """Give a linear layer an adapter; a layer of another kind makes one itself, by `with_adapter(rank, alpha)`."""
    parent, _, attribute = name.rpartition(".")
    linear: Any = model.get_submodule(name)
    make = linear.with_adapter if hasattr(linear, "with_adapter") else partial(LoRALinear, linear)
    setattr(model.get_submodule(parent), attribute, make(rank, alpha))


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
    unknown = set(parts) - set(PARTS)
    if unknown:
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
        _replace(model, name, rank, alpha)
    if embeddings and "decoder" in parts:
        for name in EMBEDDINGS:
            model.get_submodule(name).requires_grad_(True)


def merge(model: VisionLanguageModel) -> VisionLanguageModel:
    """Return a model without adapters that computes the same; tensors without an adapter are shared, not copied.

    A frozen layer of another kind than nn.Linear gives its plain weight by `merged()`, as adapters do. The model is
    where those weights are.
    """
    mergeable: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "merged")}
    weights = {f"{name}.weight": module.merged() for name, module in mergeable.items()}
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    device = next(iter(weights.values())).device if weights else model.device
    state = {name: weights[name] if name in weights else tensor.to(device) for name, tensor in state.items()}
    with torch.device("meta"):
        merged = VisionLanguageModel(model.cfg, model.image_token_id)
    merged.load_state_dict(state, assign=True)
    merged.decoder.tie_weights()
    return merged.train(model.training)


def adapter_folder(folder: Path) -> Path:
    """Where the adapters of a model's folder are: in its subfolder `adapter`, or else beside the model.

    They are in the subfolder if transformers reads the folder: it would add adapters beside the merged weights again.
    """
    return folder / ADAPTER if (folder / ADAPTER / ADAPTER_CONFIG).exists() else folder


def write_adapters(
    folder: Path, model: VisionLanguageModel, base: str | None = None, revision: str | None = None
) -> None:
    """Write everything that was trained as two files that PEFT loads; base, at revision, is the model trained on.

    Those of a model in SmolVLM's layout have transformers' names and are in the subfolder `adapter`.
    """
    settings: dict[str, Any] = {"base_model_name_or_path": base, "revision": revision}
    if model.cfg.smolvlm is not None:
        (folder := folder / ADAPTER).mkdir()
        return write_adapter_files(folder, model, smolvlm_adapters(model), settings | {"task_type": "CAUSAL_LM"})
    tensors = {
        f"{name}.{part}.weight": getattr(module, part).weight
        for name, module in adapters(model).items()
        for part in ADAPTER_TENSORS
    }
    write_adapter_files(folder, model, tensors | fully_trained(model), settings)


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


def smolvlm_adapters(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The adapters, and what was trained in full, under the names of transformers' SmolVLM.

    An adapter of our qkv_proj becomes one each of q, k and v: they share lora_A and get a third of lora_B's rows.
    """
    tensors = {}
    for name, module in adapters(model).items():
        for weight, lora_b in to_smolvlm({f"{name}.weight": module.lora_B.weight}).items():
            target = weight.removesuffix(".weight")
            tensors[f"{target}.lora_A.weight"] = module.lora_A.weight
            tensors[f"{target}.lora_B.weight"] = lora_b
    return tensors | to_smolvlm(fully_trained(model))


def _from_smolvlm(state: dict[str, Tensor], model: VisionLanguageModel, path: Path) -> dict[str, Tensor]:
    """The opposite; names that SmolVLM does not have stay. CheckpointError if q, k and v do not share lora_A."""
    ours: dict[str, Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        targets = [target.removesuffix(".weight") for target in to_smolvlm({name: p})]
        if len(targets) == 1 and f"{targets[0]}.weight" in state:
            ours[name] = state.pop(f"{targets[0]}.weight")
        pairs = [[state.pop(f"{target}.{part}.weight", None) for target in targets] for part in ADAPTER_TENSORS]
        found_a, found_b = ([tensor for tensor in tensors if tensor is not None] for tensors in pairs)
        if not found_a and not found_b:
            continue
        if len(found_a) < len(targets) or any(not torch.equal(tensor, found_a[0]) for tensor in found_a):
            raise CheckpointError(f"{path}: the adapters of {', '.join(targets)} have no lora_A in common")
        module = name.removesuffix(".weight")
        ours[f"{module}.lora_A.weight"], ours[f"{module}.lora_B.weight"] = found_a[0], torch.cat(found_b)
    return ours | state


def read_adapters(folder: Path, model: VisionLanguageModel) -> None:
    """Load the adapters in folder, written by `write_adapters` or PEFT, into the model. In place.

    A model without adapters is frozen and adapted first; one with adapters must have the same. Raises CheckpointError
    for files that cannot be read or do not fit the model.
    """
    folder = adapter_folder(Path(folder))
    rank, alpha = _read_rank_and_alpha(folder / ADAPTER_CONFIG)
    state = _read_state(folder / ADAPTER_WEIGHTS, model)
    if not adapters(model):
        model.requires_grad_(False)
        for name in sorted({key.rpartition(".lora_")[0] for key in state if ".lora_" in key}):
            _replace(model, name, rank, alpha)
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
    if model.cfg.smolvlm is not None:
        state = _from_smolvlm(state, model, path)
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
