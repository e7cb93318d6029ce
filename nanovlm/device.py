"""Where to compute, in which precision, and how much memory it took."""

import os
import sys

import torch

from models.inference.cpu_kernels import made_by

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """auto takes CUDA, then Apple's MPS, then the CPU; a device that is not there is a ValueError.

    Of several processes that torchrun started on a machine with several GPUs, each gets its own.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [kind for kind, is_there in there.items() if is_there]
    if name == "auto":
        name = available[0]
    if name == "cuda" in available and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if name not in available:
        raise ValueError(f"device={name} is not available here, only {', '.join(available)}")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto takes bfloat16 where the device is faster in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_training_dtype(name: str, device: torch.device) -> torch.dtype:
    """As choose_dtype, but auto takes float16 on a GPU without bfloat16, where a scaler keeps gradients in range."""
    if name == "auto" and device.type == "cuda" and not fast_bfloat16(device):
        return torch.float16
    return choose_dtype(name, device)


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device itself multiplies in bfloat16, several times faster than in float32.

    Of Intel's CPUs only those with AMX do: by AVX-512 alone, a product takes twice as long as in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.cpu._is_avx512_bf16_supported():
        return False
    return torch.cpu._is_amx_tile_supported() or not made_by("GenuineIntel")


def peak_memory(device: torch.device) -> int:
    """Bytes at most held at once: of the GPU on cuda, else of this process; 0 where nobody counts (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
