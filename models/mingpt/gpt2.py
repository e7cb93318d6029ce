"""Read GPT-2's published weights (Radford et al. 2019) under minGPT's names."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from models.checkpoint import CONFIG, read_object, read_state_dict, snapshot_path, tensor_names
from models.common.errors import CheckpointError

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D stores them as (in, out)
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, which are constants
SETTINGS = ("n_layer", "n_head", "n_embd", "vocab_size", "embd_pdrop", "resid_pdrop", "attn_pdrop")


def find_gpt2(folder_or_name: str | os.PathLike[str]) -> tuple[Path, dict]:
    """The folder of a GPT-2, given as a folder, a name in PUBLISHED or a Hub id, and GPTConfig's settings.

    Raises CheckpointError for a GPT-2 variant that minGPT's GPT does not compute.
    """
    if str(folder_or_name) in PUBLISHED and not os.path.isdir(folder_or_name):
        folder_or_name = f"openai-community/{folder_or_name}"
    folder = snapshot_path(folder_or_name, patterns=(CONFIG, "model*.safetensors*"))
    config = read_object(folder / CONFIG)
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
    settings = {name: config[name] for name in SETTINGS if name in config}
    return folder, settings | {"block_size": config.get("n_positions")}


def read_gpt2(folder: Path, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a GPT with the names and shapes of `empty`, in float32 and without the causal masks.

    A head that GPT-2 ties to the embedding becomes a copy. Raises CheckpointError.
    """
    shapes = {name: tuple(_transpose(name, t).shape) for name, t in empty.items() if not name.endswith(MASKS)}
    tied = None if "lm_head.weight" in tensor_names(folder) else ("transformer.wte.weight", "lm_head.weight")
    stored = read_state_dict(folder, shapes, tied=tied, rename=_rename)
    state = {name: _transpose(name, tensor).contiguous() for name, tensor in stored.items()}
    return state | {"lm_head.weight": state["lm_head.weight"].clone()} if tied else state


def _rename(name: str) -> str | None:
    """GPT's name of a tensor, which some files write without "transformer."; None for a causal mask."""
    if name.endswith(MASKS):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _transpose(name: str, tensor: Tensor) -> Tensor:
    return tensor.t() if name.endswith(TRANSPOSED) else tensor
