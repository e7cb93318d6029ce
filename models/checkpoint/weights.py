"""Tensors of safetensors files, compared with the names and shapes that are wanted before anything is allocated."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint.folder import CONFIG, WEIGHTS, read_object
from models.common import files
from models.common.errors import CheckpointError, FileError

INDEX = "model.safetensors.index.json"
MAX_MAPPED_TENSORS = 8  # of one mapping of the file
BUFFERS = re.compile(r"decoder\.rotary_embd\.\w+")  # computed when needed; float32 in files of any dtype
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
Shapes = Mapping[str, tuple[int, ...]]


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped; CheckpointError if it cannot be read."""
    try:
        files.check_regular(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileError as error:
        raise CheckpointError(error) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read, it may be truncated: {error}; replace the file") from None


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors or, if the weights are sharded, the files that model.safetensors.index.json names."""
    paths = [folder / WEIGHTS]
    if not paths[0].exists():
        if not (folder / INDEX).exists():
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            hint = f"; {pickled[0]} may run code and is not read: save it as safetensors" if pickled else ""
            raise CheckpointError(f"{folder} has no {WEIGHTS}; a model is a folder with {CONFIG} and {WEIGHTS}{hint}")
        names = read_object(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or any(Path(str(n)).name != n for n in names.values()):
            raise CheckpointError(f"{folder / INDEX} has no weight_map of tensors to files beside it")
        paths = [folder / name for name in sorted(set(names.values()))]
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"{path} is missing, which {INDEX} names")
    return paths


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in a folder's files."""
    names: list[str] = []
    for path in weight_files(folder):
        with open_tensors(path) as file:
            names += file.keys()
    return names


def checkpoint_dtype(folder: str | os.PathLike[str]) -> torch.dtype:
    """The dtype of the weights in folder; of several, the smallest that can represent them all.

    Of tensors that are no weights, such as 8-bit ones, only `read_state_dict` says so.
    """
    dtypes = set()
    for path in weight_files(Path(folder)):
        with open_tensors(path) as file:
            dtypes |= {file.get_tensor(name).dtype for name in [*file.keys()] if not BUFFERS.fullmatch(name)}
    return reduce(torch.promote_types, dtypes & FLOATS) if dtypes & FLOATS else torch.float32


def read_state_dict(
    folder: str | os.PathLike[str],
    shapes: Shapes,
    *,
    tied: tuple[str, str] | None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rename: Callable[[str], str | None] = lambda name: None if BUFFERS.fullmatch(name) else name,
) -> dict[str, Tensor]:
    """The tensors of these names and shapes from a folder's safetensors files, which must hold all and no other.

    Names and shapes are compared before anything is allocated. Weights already in dtype stay memory-mapped on a CPU.
    tied names an embedding and a head that are one: the files may hold either or, if they are equal, both. rename gives
    a name of shapes for one of the files, or None for a tensor that is not used. Raises CheckpointError.
    """
    wanted = {name: shape for name, shape in shapes.items() if not (tied and name == tied[0])}
    paths = weight_files(Path(folder))
    path = paths[0] if len(paths) == 1 else Path(folder)
    state = {}
    with ExitStack() as stack:
        found: dict[str, tuple[Path, str]] = {}
        handles = {file: stack.enter_context(open_tensors(file)) for file in paths}
        stats = {file: os.stat(file) for file in paths}
        for file, handle in handles.items():
            stored = [*handle.keys()]
            found |= {name: (file, theirs) for theirs in stored if (name := rename(theirs)) is not None}
        if tied and tied[0] in found:
            embedding = found.pop(tied[0])
            head = found.setdefault(tied[1], embedding)
            if not torch.equal(*(handles[file].get_tensor(theirs) for file, theirs in (embedding, head))):
                raise CheckpointError(f"{path}: {CONFIG} ties {embedding[1]} and {head[1]}, but they differ")
        _check_names(path, wanted, {name: (handles[file], theirs) for name, (file, theirs) in found.items()})
        names = sorted(wanted, key=lambda name: name.split(".")[::-1])  # equal kinds are mapped and released together
        for start in range(0, len(names), MAX_MAPPED_TENSORS):
            for name, tensor in _mapped({name: found[name] for name in names[start:][:MAX_MAPPED_TENSORS]}, stats):
                if reason := why_unusable(tensor, dtype):
                    raise CheckpointError(f"{path}: {name} {reason}")
                state[name] = tensor.to(device, dtype)
    if tied:
        state[tied[0]] = state[tied[1]]
    return state


def _mapped(tensors: Mapping[str, tuple[Path, str]], stats: Mapping[Path, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors by file and name there, in mappings of their own: pages stay while a mapping lives."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for name, (file, theirs) in tensors.items():
            if file not in handles:
                handles[file] = stack.enter_context(open_tensors(file))
                if not os.path.samestat(os.stat(file), stats[file]):
                    raise CheckpointError(f"{file} was replaced while it was read; try again")
            yield name, handles[file].get_tensor(theirs)


def _check_names(path: Path, wanted: Shapes, found: Mapping[str, tuple[Any, str]]) -> None:
    """Raise CheckpointError unless the tensors found, (file, its name), are those wanted, in name and shape."""
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(f"{path} lacks {len(missing)} tensors that {CONFIG} asks for, first {missing[0]}")
    if more := sorted(found[name][1] for name in found.keys() - wanted.keys()):
        raise CheckpointError(f"{path} has {len(more)} tensors that {CONFIG} has no place for, first {more[0]!r}")
    for name, shape in wanted.items():
        handle, theirs = found[name]
        if (actual := tuple(handle.get_slice(theirs).get_shape())) != shape:
            raise CheckpointError(f"{path}: {theirs} is {actual}, but {CONFIG} asks for {shape}")


def why_unusable(tensor: Tensor, dtype: torch.dtype) -> str:
    """Why the values of a tensor, read in place, cannot be weights in dtype, as not finite; "" if they can."""
    if tensor.dtype not in FLOATS:
        return f"is stored as {tensor.dtype}, not as floating-point numbers of 16 bits or more"
    low, high = (bound.item() for bound in tensor.aminmax())  # nan, if any is
    limit = torch.finfo(dtype).max
    if -limit <= low <= high <= limit:
        return ""
    return f"has values from {low} to {high}, but weights must be finite, in {dtype} up to {limit}"
