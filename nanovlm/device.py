"""Where to compute and in which precision."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """auto takes CUDA, then Apple's MPS, then the CPU; a device that is not there is a ValueError."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [kind for kind, is_there in there.items() if is_there]
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        raise ValueError(f"device={name} is not available here, only {', '.join(available)}")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto takes bfloat16 where the device has it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if native_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device itself computes in bfloat16, which is then several times faster than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
