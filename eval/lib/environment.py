"""Where a figure was measured."""

import platform
from pathlib import Path

import torch


def environment(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """One line: processor, threads, torch, precision, device."""
    device, cpuinfo = torch.device(device), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}, {where}"


def synchronize(device: torch.device) -> None:
    """Wait until device has done what it was told, so that a clock read afterwards tells the time it took."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
