"""What a run will take, before anything runs: a step is rehearsed with tensors that have shapes but no numbers."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import IGNORE_INDEX
from nanovlm.device import choose_training_dtype
from nanovlm.training.config import TrainConfig
from nanovlm.training.optimizer import accelerated, freeze

LOOKED_AT = 8  # batches, of which the largest is rehearsed
KEPT_BY_MALLOC = 0.4  # of a step's memory, on CPUs: freed, yet not given back; 0.3 to 0.7 were measured with glibc


@dataclass(frozen=True)
class Plan:
    """Sizes are bytes; process is what this process held before, where that is measured (on Linux, without a GPU)."""

    parameters: int
    learning: int
    tokens: int  # per step, on one process, padding included
    answers: int
    weights: int
    moments: int
    step: int  # at most, between its start and its end: gradients, and what the way back needs
    saving: int
    process: int

    @property
    def peak(self) -> int:
        return self.process + self.weights + self.moments + max(self.step, self.saving)

    def __str__(self) -> str:
        mib = {
            name: f"{getattr(self, name) / 2**20:,.0f}" for name in ("weights", "moments", "step", "process", "peak")
        }
        return (
            f"{self.parameters:,} parameters, {self.learning:,} of them learn; {self.tokens:,} tokens per step, "
            f"{self.answers:,} of them answers; about {mib['peak']} MiB at most: weights {mib['weights']}, "
            f"AdamW's moments {mib['moments']}, a step {mib['step']}, the program itself {mib['process']}"
        )


class _Living(TorchDispatchMode):
    """Counts the bytes of what operations make, for as long as it lives; embed's one question it answers itself."""

    def __init__(self, image_tokens: int):
        super().__init__()
        self.now = self.peak = 0
        self.image_tokens, self.known = image_tokens, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.image_tokens
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.count, out)
        self.peak = max(self.peak, self.now)
        return out

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.known:
            self.known[storage] = True
            self.now += (size := storage.nbytes())
            weakref.finalize(storage, self.forget, size)

    def forget(self, size: int) -> None:
        self.now -= size


def plan(model: VisionLanguageModel, batch: Callable[[int], dict], cfg: TrainConfig) -> Plan:
    """What training model so will take on its device; reads the first batches, and leaves model as it is.

    Memory of compiled blocks, which need less, is that of blocks as they are. Scratch space within an operation is
    not seen.
    """
    numbers = range(min(LOOKED_AT, cfg.steps * cfg.accumulate))
    largest = max((batch(i) for i in numbers), key=lambda b: b["input_ids"].numel())
    images = largest["images"]
    image_tokens = 0 if images is None else len(images) * model.cfg.mp_image_token_length
    dtype = choose_training_dtype(cfg.dtype, model.device)
    process = resident() - sum(p.nbytes for p in model.parameters()) if model.device.type == "cpu" else 0
    with FakeTensorMode() as shapes, torch.device(model.device):
        rehearsed = VisionLanguageModel(model.cfg, model.image_token_id).train()
        freeze(rehearsed, cfg)
        inputs = {name: shapes.from_tensor(t).to(model.device) if t is not None else t for name, t in largest.items()}
        with _Living(image_tokens) as living, accelerated(rehearsed, cfg):
            for p in rehearsed.parameters():
                living.known[p.untyped_storage()] = True
            for _ in range(min(2, cfg.accumulate)):  # from the second on, gradients are there at the start
                with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
                    _, loss = rehearsed(**inputs)
                loss.backward()
    on_cpu = model.device.type == "cpu"
    learning = [p for p in rehearsed.parameters() if p.requires_grad]
    read = sum(tensor.nbytes for tensor in largest.values() if tensor is not None)
    moments = 2 * sum(p.nbytes for p in learning)
    return Plan(
        parameters=sum(p.numel() for p in rehearsed.parameters()),
        learning=sum(p.numel() for p in learning),
        tokens=largest["input_ids"].numel() * cfg.accumulate,
        answers=int((largest["targets"] != IGNORE_INDEX).sum()) * cfg.accumulate,
        weights=sum(p.nbytes for p in rehearsed.parameters()),
        moments=moments,
        step=int(living.peak * (1 + KEPT_BY_MALLOC * on_cpu)) + read * cfg.accumulate,
        saving=moments * on_cpu,  # safetensors copies what it writes
        process=max(0, process),
    )


def resident() -> int:
    """Bytes of memory that this process holds now; 0 where nobody tells (outside Linux)."""
    told = Path("/proc/self/status")
    lines = told.read_text().splitlines() if told.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
