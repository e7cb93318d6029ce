"""Distributed training under torchrun: each process reads every n-th batch, and gradients are summed once a step."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models.common import files
from nanovlm.errors import TrainingError


def world_size() -> int:
    """The number of processes that torchrun has started, else 1."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """True for the process that writes files and lines."""
    return os.environ.get("RANK", "0") == "0"


class DistributedContext:
    """The processes that train one model together; with a single process every method is a no-op.

    Gradients are summed after the last backward pass of a step, not by hooks: so batches may differ between processes
    in having images or not, and no process waits for a gradient that another one does not compute.
    """

    def __init__(self, device: torch.device):
        """Join the process group of torchrun's environment, if any, or use the one that the caller has initialized."""
        self.world_size = world_size()
        self.rank = int(os.environ.get("RANK", 0))
        self.is_main = is_main()
        self.device = device
        self.lock = ExitStack()
        self.owns_group = self.world_size > 1 and not dist.is_initialized()
        if self.owns_group:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            # Imported before a group exists: defaults of its functions would keep the group, and gloo's threads, alive.
            from torch.distributed import nn as _  # noqa: F401

            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the processes, exact for integers up to 2^53."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def merge(self, items: dict[str, Any]) -> dict[str, Any]:
        """The items of all processes, whose keys differ."""
        if self.world_size == 1:
            return dict(items)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, items)
        return {key: value for part in gathered for key, value in part.items()}

    def claim(self, folder: Path) -> None:
        """Keep other runs out of folder until self.lock is left; TrainingError unless it is one folder for all."""
        with ExitStack() as stack:
            mark = {}
            if self.is_main:
                self.lock.enter_context(files.locked(folder))
                mark = {"name": stack.enter_context(files.scratch_folder(folder)).name}
            name = self.merge(mark)["name"]  # from the main process
            (found,) = self.sum((folder / name).exists())
        if found < self.world_size:
            raise TrainingError(
                f"{folder} is not the same folder for all {self.world_size} processes: {found:.0f} see what the first "
                "one writes; name one on a file system that all hosts share"
            )

    def broadcast_weights(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        for tensor in model.state_dict().values() if self.world_size > 1 else ():
            dist.broadcast(tensor, 0)

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum each gradient over the processes, in one message; one that no process has stays None."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.world_size == 1 or not trained:
            return
        counts = self.sum(*[p.grad is not None for p in trained])
        used = [p for p, count in zip(trained, counts) if count]
        if used:
            total = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in used])
            dist.all_reduce(total)
            for p, gradient in zip(used, total.split([p.numel() for p in used])):
                p.grad = gradient.view_as(p)

    @contextmanager
    def peer_errors(self) -> Iterator[None]:
        """Turn the failure of a message, because another process has ended, into a TrainingError."""
        try:
            yield
        except RuntimeError as error:
            if self.world_size > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise TrainingError(
                    "another process ended, or its host cannot be reached; its own message says why. Run the same "
                    "command again to resume from the last checkpoint"
                ) from error
            raise

    def close(self) -> None:
        """Leave the process group, unless the caller initialized it."""
        if self.owns_group:
            dist.destroy_process_group()
