"""What a training step needs, estimated before it runs on tensors that have shapes but no values."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from nanovlm.errors import TrainingError, is_out_of_memory
from nanovlm.training.config import TrainConfig
from nanovlm.training.optimizer import accelerated, freeze

SAMPLED_BATCHES = 8  # of which the largest is used
MALLOC_OVERHEAD = 0.7  # memory that glibc's malloc does not return, as a share of a step's; 0.3 to 1.0 were measured


@dataclass(frozen=True)
class MemoryEstimate:
    """Sizes in bytes, and counts, of a training run on one process."""

    parameters: int  # how many
    trained: int  # how many of them
    tokens: int  # per step, padding included
    answer_tokens: int  # per step
    weights: int
    moments: int
    step: int  # peak of activations and gradients
    saving: int  # copies made to write a checkpoint
    process: int  # of this process before the model; measured on Linux for training on the CPU, else 0

    @property
    def peak(self) -> int:
        return self.process + self.weights + self.moments + max(self.step, self.saving)

    def __str__(self) -> str:
        def mib(size: int) -> str:
            return f"{size / 2**20:,.0f}"

        return (
            f"{self.parameters:,} parameters, {self.trained:,} of them trained; {self.tokens:,} tokens per step, "
            f"{self.answer_tokens:,} of them answers; peak memory about {mib(self.peak)} MiB: "
            f"weights {mib(self.weights)}, AdamW's moments {mib(self.moments)}, "
            f"a step {mib(self.step)}, the process itself {mib(self.process)}"
        )


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have created and that are still alive.

    Fake tensors have no values. The model reads one, the number of image tokens: .item() returns image_tokens.
    """

    def __init__(self, image_tokens: int):
        super().__init__()
        self.now = self.peak = 0
        self.image_tokens, self.counted = image_tokens, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.image_tokens
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._add, out)
        self.peak = max(self.peak, self.now)
        return out

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor that existed before."""
        self.counted[tensor.untyped_storage()] = True

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.counted:
            self.counted[storage] = True
            size = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.now -= size


def estimate_memory(model: VisionLanguageModel, get_batch: Callable[[int], dict], cfg: TrainConfig) -> MemoryEstimate:
    """Estimate what training `model` on its device needs; reads the first batches and leaves the model as it is.

    Not counted: scratch memory inside an operation, and what compilation and sharding save.
    """
    numbers = range(min(SAMPLED_BATCHES, cfg.max_steps * cfg.gradient_accumulation_steps))
    batch = max((get_batch(i) for i in numbers), key=lambda b: b["input_ids"].numel())
    on_cpu = model.device.type == "cpu"
    parameters = list(model.parameters())
    process = resident_memory() - sum(p.nbytes for p in parameters) if on_cpu else 0
    rehearsal, step_peak = rehearse_step(model, batch, cfg)
    trained = [p for p in rehearsal.parameters() if p.requires_grad]
    batch_bytes = sum(tensor.nbytes for tensor in batch.values() if tensor is not None)
    moments = 2 * sum(p.nbytes for p in trained)
    return MemoryEstimate(
        parameters=sum(p.numel() for p in rehearsal.parameters()),
        trained=sum(p.numel() for p in trained),
        tokens=batch["input_ids"].numel() * cfg.gradient_accumulation_steps,
        answer_tokens=int((batch["targets"] != IGNORE_INDEX).sum()) * cfg.gradient_accumulation_steps,
        weights=sum(p.nbytes for p in rehearsal.parameters()),
        moments=moments,
        step=int(step_peak * (1 + MALLOC_OVERHEAD if on_cpu else 1)) + batch_bytes * cfg.gradient_accumulation_steps,
        saving=moments if on_cpu else 0,  # safetensors copies what it writes
        process=max(0, process),
    )


def rehearse_step(model: VisionLanguageModel, batch: dict, cfg: TrainConfig) -> tuple[VisionLanguageModel, int]:
    """A fake model of the same shape and, in bytes, the peak memory of its forward and backward passes on the batch."""
    dtype = choose_training_dtype(cfg.dtype, model.device)
    n_images = 0 if batch["images"] is None else len(batch["images"])
    with FakeTensorMode() as fake, torch.device(model.device):
        rehearsal = VisionLanguageModel(model.cfg, model.image_token_id).train()
        freeze(rehearsal, cfg)
        inputs = {name: t if t is None else fake.from_tensor(t).to(model.device) for name, t in batch.items()}
        memory = LiveMemory(n_images * model.cfg.mp_image_token_length)
        with memory, accelerated(rehearsal, replace(cfg, compile=False)):
            for p in rehearsal.parameters():
                memory.ignore(p)
            for _ in range(min(2, cfg.gradient_accumulation_steps)):  # from the second batch on, gradients exist
                with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
                    _, loss = rehearsal(**inputs)
                loss.backward()
    return rehearsal, memory.peak


def resident_memory() -> int:
    """Bytes of memory that this process holds now; 0 outside Linux, where it cannot be read."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn running out of memory, here or in a data loader worker, into a TrainingError that says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "DataLoader worker (pid" in str(error):  # killed, or exited
            line = str(error).strip().splitlines()[-1]
            raise TrainingError(f"{line} Memory may have run out; --num-workers 0 needs less") from error
        if is_out_of_memory(error):
            raise TrainingError(
                "not enough memory; lower --batch-size and raise --gradient-accumulation-steps, or add "
                "--gradient-checkpointing (--dry-run estimates the memory)"
            ) from error
        raise
