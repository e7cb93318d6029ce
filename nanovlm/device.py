"""Choosing a device and a dtype; measuring peak memory and whether other processes use the cores.

On a busy machine one thread can be many times faster than two: OpenMP's threads wait for each other at every
operation, and one that is not running stalls the others.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from models.checkpoint import checkpoint_dtype
from models.inference.kernels.load import WITHOUT_BF16_DOT, chosen_level, cpu_info
from nanovlm import options
from nanovlm.console import slow
from nanovlm.errors import InputError

DTYPES = {name: getattr(torch, name) for name in options.DTYPES}
MIN_CPU_SHARE = 0.7  # CPU time over wall time of a thread below which the machine is called busy
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_MAX = -4


def choose_device(name: str) -> torch.device:
    """The device of that name; auto is CUDA, else Apple's MPS, else the CPU. InputError if it is not available.

    Under torchrun each process gets the GPU of its LOCAL_RANK.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [device for device, is_here in found.items() if is_here]
    if name == "auto":
        name = available[0]
    if name not in available:
        raise InputError(f"{name} is not available here, only {', '.join(available)}", field="device")
    rank = os.environ.get("LOCAL_RANK") if name == "cuda" else None
    return torch.device(name) if rank is None else torch.device(name, int(rank))


def choose_dtype(name: str, device: torch.device, folder: Path | None = None) -> torch.dtype:
    """The dtype of that name; auto is bfloat16 where the device is faster in it, else float32.

    On a CPU whose kernels multiply bfloat16 weights in float32, auto keeps the weights in folder as they are stored:
    that is as exact as float32, takes half the memory and decodes faster.
    """
    if name == "auto" and device.type == "cpu" and (level := chosen_level()) is not None:
        stored = torch.float32 if folder is None else checkpoint_dtype(folder)
        is_float32 = level in WITHOUT_BF16_DOT and stored != torch.bfloat16
        return torch.float32 if is_float32 else torch.bfloat16
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise InputError(f"{name} is none of auto, {', '.join(DTYPES)}", field="dtype")
    return DTYPES[name]


def choose_training_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; auto is what PyTorch's own operations are fastest in.

    On a GPU without bfloat16 that is float16: training scales the loss for it.
    """
    if name != "auto":
        return choose_dtype(name, device)
    if fast_bfloat16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def fast_bfloat16(device: torch.device, cpu_info: Callable[[str], str] = cpu_info) -> bool:
    """True if PyTorch multiplies matrices faster in bfloat16 than in float32.

    On Intel CPUs that takes AMX: with AVX-512 alone a bfloat16 matmul takes twice as long.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = cpu_info("flags").split() if device.type == "cpu" else []
    return "avx512_bf16" in flags and ("amx_bf16" in flags or cpu_info("vendor_id") != "GenuineIntel")


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated on the GPU for cuda, else of this process; 0 where unknown (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # on Linux getrusage also counts what the parent process held at the start
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform != "darwin":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def keep_freed_memory() -> None:
    """Keep freed memory for this process's next tensors, where its C library is glibc. For programs that train.

    By default large blocks go back to the system, which clears their pages when it gives them again. Without that a
    training step takes 6% less time (AMD EPYC, Zen 4, bfloat16: the embedded model and 222M).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def busy_note(wall_s: float, cpu_s: float) -> str:
    """A line if a computation's threads waited for cores that other processes use; empty if they did not."""
    threads = torch.get_num_threads()
    share = cpu_s / (wall_s * threads)
    if threads == 1 or share > MIN_CPU_SHARE:
        return ""
    what = f"the {threads} threads ran only {share:.0%} of the time, as other processes use the cores"
    return slow(what, ["--threads 1"])
