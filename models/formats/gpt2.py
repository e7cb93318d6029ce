"""Read GPT-2's published weights (Radford et al. 2019) under minGPT's names."""

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import CONFIG, read_object, snapshot_path
from models.errors import CheckpointError

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D stores them as (in, out)
SETTINGS = ("n_layer", "n_head", "n_embd", "vocab_size", "embd_pdrop", "resid_pdrop", "attn_pdrop")


def read_gpt2(folder_or_name: str | os.PathLike) -> tuple[dict, dict[str, Tensor]]:
    """Return GPTConfig's settings and GPT's state dict, in float32 and without the causal masks.

    Takes a folder, a name in PUBLISHED or a Hub id. Raises CheckpointError for files that cannot be read, and for a
    GPT-2 variant that minGPT's GPT does not compute.
    """
    if str(folder_or_name) in PUBLISHED and not os.path.isdir(folder_or_name):
        folder_or_name = f"openai-community/{folder_or_name}"
    folder = snapshot_path(folder_or_name, files=(CONFIG, "model*.safetensors"))
    config = read_object(folder / CONFIG)
    tensors = _read_tensors(folder)
    _check_config(folder, config)
    settings = {name: config[name] for name in SETTINGS if name in config}
    return settings | {"block_size": config.get("n_positions")}, _to_mingpt(tensors)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            tensors |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read as a GPT-2: {error}") from None
    if not tensors:
        raise CheckpointError(f"{folder} is not a GPT-2: it lacks a model.safetensors")
    return tensors


def _check_config(folder: Path, config: dict) -> None:
    """Raise CheckpointError for a setting with which GPT would compute something else."""
    supported = {  # the first value is GPT-2's default
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * config.get("n_embd", 0)),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
    for key, values in supported.items():
        if config.get(key, values[0]) not in values:
            raise CheckpointError(
                f"{folder / CONFIG}: {key}={config[key]}, but minGPT's GPT supports only {values[-1]}"
            )


def _to_mingpt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and transpose GPT-2's tensors; a head that GPT-2 ties to the embedding becomes a copy."""
    state = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks, which are constants
            continue
        tensor = (tensor.t() if name.endswith(TRANSPOSED) else tensor).float().contiguous()
        state[name if name == "lm_head.weight" else f"transformer.{name}"] = tensor
    if "lm_head.weight" not in state and "transformer.wte.weight" in state:
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    return state
