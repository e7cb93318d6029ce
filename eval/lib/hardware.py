"""The machine a figure was measured on: its name, and its two speed limits (Williams et al. 2009, "Roofline")."""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version

import torch
from torch.nn.functional import linear

from eval.lib.cpu_levels import current_level
from models.inference.kernels.load import cpu_info

PACKAGES = {  # by the module whose presence says that the package was used
    "transformers": "transformers", "llama_cpp": "llama-cpp-python", "onnxruntime": "onnxruntime",
    "openvino": "openvino",
}  # fmt: skip


def environment(
    device: str | torch.device = "cpu", dtype: torch.dtype | None = None, levels: Sequence[str] = ()
) -> str:
    """One line: processor, levels of its instructions, threads, versions of loaded engines, precision, device."""
    device = torch.device(device)
    parts = [cpu_name(), f"level {' '.join(levels or [current_level()])}", f"{torch.get_num_threads()} threads"]
    parts += [f"torch {torch.__version__}"]
    parts += [f"{package} {version(package)}" for module, package in PACKAGES.items() if module in sys.modules]
    parts += [str(dtype)] if dtype else []
    return ", ".join([*parts, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type])


def cpu_name() -> str:
    """The processor's model name, or where that is unknown its architecture."""
    return cpu_info("model name") or platform.machine()


@cache
def memory_bandwidth(size: int = 2**29) -> float:
    """Bytes per second at which all threads together read `size` bytes that are in no cache."""
    tensor = torch.ones(size // 4)
    return size / _fastest(tensor.amax)


@cache
def matmul_flops(dtype: torch.dtype, n: int = 2048) -> float:
    """Operations per second of an n x n matmul by PyTorch, in dtype or, where that is faster, in float32."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    matmuls = [partial(torch._int_mm if dtype == torch.int8 else linear, a, b)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        matmuls.append(partial(linear, a.to_mkldnn(), b.to_mkldnn()))  # oneDNN; MKL is slow on AMD's processors
    with torch.inference_mode():
        flops = 2 * n**3 / min(map(_fastest, matmuls))
    return flops if dtype == torch.float32 else max(flops, matmul_flops(torch.float32, n))


def _fastest(function: Callable[[], object], rounds: int = 9) -> float:
    """Seconds of the fastest of several calls within a second: the speed without interference from other programs."""
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < 1:
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
