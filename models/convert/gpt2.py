"""GPT-2's published weights (Radford et al. 2019) under minGPT's names."""

import os

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import CONFIG, read_object, snapshot_path
from models.errors import CheckpointError

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D stores them (in, out)
SETTINGS = ("n_layer", "n_head", "n_embd", "vocab_size", "embd_pdrop", "resid_pdrop", "attn_pdrop")


def read_gpt2(folder_or_name: str | os.PathLike) -> tuple[dict, dict[str, Tensor]]:
    """GPTConfig's settings and GPT's state dict, float32, without the masks; from a folder, or from the Hub by name.

    A model of the GPT-2 family that minGPT's GPT would not compute as its config.json says is a CheckpointError.
    """
    if str(folder_or_name) in PUBLISHED and not os.path.isdir(folder_or_name):
        folder_or_name = f"openai-community/{folder_or_name}"
    folder = snapshot_path(folder_or_name, files=(CONFIG, "model*.safetensors"))
    raw = read_object(folder / CONFIG)
    try:
        tensors = {name: t for file in sorted(folder.glob("model*.safetensors")) for name, t in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read as a GPT-2: {error}") from None
    if not tensors:
        raise CheckpointError(f"{folder} is no GPT-2: it lacks a model.safetensors")
    for key, known in {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * raw.get("n_embd", 0)),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }.items():
        if raw.get(key, known[0]) not in known:
            raise CheckpointError(f"{folder / CONFIG}: {key}={raw[key]}, but minGPT's GPT knows only {known[-1]}")

    state = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # constants
            continue
        tensor = (tensor.t() if name.endswith(TRANSPOSED) else tensor).float().contiguous()
        state[name if name == "lm_head.weight" else f"transformer.{name}"] = tensor
    if "lm_head.weight" not in state and "transformer.wte.weight" in state:  # tied, which minGPT's never is
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    settings = {name: raw[name] for name in SETTINGS if name in raw}
    return settings | {"block_size": raw.get("n_positions")}, state
