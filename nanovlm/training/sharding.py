"""FSDP2 (Zhao et al. 2023) and its checkpoints, by PyTorch's `fully_shard` and `torch.distributed.checkpoint`.

Each process computes on, writes and reads its own part of every tensor, and no process needs memory for a whole model.
The files are safetensors, so that reading them runs no code.
"""

import warnings
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.vision_language_model import VisionLanguageModel
from nanovlm.errors import CheckpointError, InputError
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.optimizer import empty_copy

FILE_BYTES = 2**28  # of all shards of a file together; a process holds its part of one file twice while it writes


def shard(model: VisionLanguageModel, context: DistributedContext) -> None:
    """Shard weights, gradients and optimizer state over the processes.

    A block of the language model is gathered only while it computes. All else is gathered for the whole step: so a
    process whose batch has no images still takes part when the vision encoder's weights are gathered and its gradients
    are summed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise InputError(f"fsdp needs a newer torch than {torch.__version__}; omit fsdp, or upgrade torch")
    mesh = init_device_mesh(context.device.type, (context.world_size,))
    modules: list[Any] = [*model.decoder.blocks, model]  # fully_shard makes each an FSDPModule
    for module in modules:
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # the loss is already divided by the tokens of all processes
        module.set_force_sum_reduction_for_comms(True)
    modules[-1].set_reduce_scatter_unused_params(True)


def drop_image_gradients(model: VisionLanguageModel) -> None:
    """For a step without images: FSDP2 makes these gradients 0 instead of None, and AdamW would decay the weights."""
    for p in (*model.vision_encoder.parameters(), *model.MP.parameters()):
        p.grad = None


def full_model(model: VisionLanguageModel, cfg: TrainConfig, context: DistributedContext) -> VisionLanguageModel:
    """An unsharded copy of a sharded model on the main process; every process must call it, and others get model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not context.is_main:
        return model
    copy = empty_copy(model.cfg, model.image_token_id, cfg)
    copy.load_state_dict(state, assign=True)
    copy.decoder.tie_weights()
    return copy.to(context.device).train(model.training)


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor, assembled if it is sharded; every process must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """The tensor, or this process's part of a sharded one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copy_full(value: Tensor, target: Any) -> None:
    """Copy a whole tensor into target, which may be sharded."""
    if hasattr(target, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


# ---------------------------------------------------------------------------------------------------- files of shards


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors, sharded or the same everywhere, into folder, which all processes share.

    Every process must call it, with the same names. OSError on all of them if one of them cannot write.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    ends = accumulate(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    numbers = {name: 1 + end // FILE_BYTES for name, end in zip(tensors, ends)}  # of files
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # which is no Exception
        failure: Any = next(iter(error.failures.values()))[0]
        raise OSError(getattr(failure, "errno", None), f"{getattr(failure, 'strerror', None) or failure}") from None


def tensor_names(folder: Path, files: Collection[str]) -> set[str]:
    """The names of the tensors in files of folder. CheckpointError if one is missing, cut or no safetensors file."""
    names: set[str] = set()
    for path in (folder / name for name in files):
        try:
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return names


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors in place, each process its part of those that are sharded, in whatever way.

    Processes do not communicate for that.
    """
    try:
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    except ImportError:
        raise InputError(f"{folder} needs a newer torch than {torch.__version__} to be read; upgrade torch") from None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is meant here
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
