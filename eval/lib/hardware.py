"""The machine a figure was measured on: its name, its two speed limits, and the least time that a stage needs there.

The last is the roofline model's (Williams et al. 2009).
"""

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from eval.lib.cpu_levels import current_level
from models.config import VLMConfig
from models.inference.kernels.load import cpu_info
from models.vision_language_model import PrefillState, VisionLanguageModel

PACKAGES = {  # by the module whose presence says that the package was used
    "llama_cpp": "llama-cpp-python", "openvino": "openvino",
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


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count the operations of matmuls and attention, as PyTorch does.

    Within the context attention is computed by matmuls: torch 2.14 does not count its fused form on a CPU.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def _fastest(function: Callable[[], object], rounds: int = 9) -> float:
    """Seconds of the fastest of several calls within a second: the speed without interference from other programs."""
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < 1:
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@dataclass(frozen=True)
class StageCost:
    """Weights that a stage reads once, and its floating-point operations."""

    weights: int
    flops: int

    def roofline_s(self, weight_bytes: float, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds to read the weights, or to compute, whichever is longer; weight_bytes is of one entry."""
        return max(self.weights * weight_bytes / bytes_per_s, self.flops / flops_per_s)


@torch.inference_mode()
def stage_costs(cfg: VLMConfig, prompt_tokens: int, batch_size: int = 1) -> dict[str, StageCost]:
    """Costs of encoding one image, of prefill and of one decode step, counted by torch on the meta device."""
    with torch.device("meta"):
        model = VisionLanguageModel(cfg, -1).eval()
        image = torch.zeros(1, 3, cfg.vit_img_size, cfg.vit_img_size)
        ids = torch.ones(batch_size, prompt_tokens, dtype=torch.long)
        embeddings = model.decoder.token_embedding(ids)
        state = PrefillState(model.decoder(embeddings)[1])
    encoder = nn.ModuleList([model.vision_encoder, model.MP])
    stages: dict[str, tuple[nn.Module, Callable[[], object]]] = {
        "encode": (encoder, lambda: model.MP(model.vision_encoder(image))),
        "prefill": (model.decoder, lambda: model.decoder.head(model.decoder(embeddings)[0][:, -1])),
        "decode": (model.decoder, lambda: model.decode(ids[:, 0], state)),
    }
    costs = {}
    for name, (module, run) in stages.items():
        with count_flops() as counter:
            run()
        weights = sum(parameter.numel() for parameter in module.parameters())  # a tied head counts once
        costs[name] = StageCost(weights, counter.get_total_flops())
    return costs
