"""Tensors in files of shards: each process writes and reads its own part of every tensor, by PyTorch's
torch.distributed.checkpoint, and no process needs memory for a whole model.

The files are safetensors, so that reading them runs no code.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovlm.errors import CheckpointError, InputError

FILE_BYTES = 2**28  # of all shards of a file together; a process holds its part of one file twice while it writes


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors, sharded or the same everywhere, into folder, which all processes share.

    Every process must call it, with the same names. OSError on all of them if one of them cannot write.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
    )
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # which is no Exception
        failure: Any = next(iter(error.failures.values()))[0]
        raise OSError(getattr(failure, "errno", None), f"{getattr(failure, 'strerror', None) or failure}") from None


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of each tensor's file, from 1; a file holds FILE_BYTES, or one tensor that is larger."""
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if size and size + nbytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += nbytes
    return numbers


def shard_sizes(folder: Path) -> dict[str, int]:
    """The sizes of the files in folder in bytes, by name."""
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir())}


def check_shards(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError unless the folder's files have these sizes, and are safetensors."""
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes instead of {size:,}")
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def shard_names(folder: Path) -> set[str]:
    """The names of the tensors in folder."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
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
