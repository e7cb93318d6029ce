"""Choosing a device and a dtype, and measuring peak memory."""

import os
import sys
from pathlib import Path

import torch

from models.checkpoint import checkpoint_dtype
from models.inference.kernels.load import chosen_level, cpu_info
from nanovlm.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device of that name; auto is CUDA, else Apple's MPS, else the CPU. InputError if it is not available.

    Under torchrun each process gets the GPU of its LOCAL_RANK.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        name = available[0]
    if name not in available:
        raise InputError(f"device={name} is not available here, only {', '.join(available)}")
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device(name)


def choose_dtype(name: str, device: torch.device, folder: Path | None = None) -> torch.dtype:
    """The dtype of that name; auto is bfloat16 where the device is faster in it, else float32.

    On a CPU whose kernels multiply bfloat16 weights in float32, auto keeps the weights in folder as they are stored:
    that is as exact as float32, takes half the memory and decodes faster.
    """
    if name == "auto":
        if device.type == "cpu" and (level := chosen_level()) is not None:
            stored = torch.float32 if folder is None else checkpoint_dtype(folder)
            return torch.bfloat16 if level in ("bf16", "amx") or stored == torch.bfloat16 else torch.float32
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype={name} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_training_dtype(name: str, device: torch.device) -> torch.dtype:
    """As choose_dtype, but auto is what PyTorch's own operations are fastest in.

    On a GPU without bfloat16 that is float16: training scales the loss for it.
    """
    if name != "auto":
        return choose_dtype(name, device)
    if device.type == "cuda" and not fast_bfloat16(device):
        return torch.float16
    return torch.bfloat16 if fast_bfloat16(device) else torch.float32


def fast_bfloat16(device: torch.device) -> bool:
    """Whether PyTorch multiplies matrices faster in bfloat16 than in float32.

    On Intel CPUs that takes AMX: with AVX-512 alone a bfloat16 matmul takes twice as long.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = cpu_info("flags").split() if device.type == "cpu" else []
    return "avx512_bf16" in flags and ("amx_bf16" in flags or cpu_info("vendor_id") != "GenuineIntel")


def available_cores() -> int:
    """CPU cores that this process may use: a container or taskset may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated on the GPU for cuda, else of this process; 0 where unknown (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # on Linux getrusage also counts what the parent process held at the start
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
