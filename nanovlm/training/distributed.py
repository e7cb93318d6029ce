"""Distributed training under torchrun: each process reads every n-th batch, and gradients are summed once a step."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanovlm.data.file_lock import file_lock
from nanovlm.errors import TrainingError

MAX_BUCKETED_BYTES = 2**20  # smaller gradients are summed in one message, because each message has a latency


def training_lock(folder: Path) -> AbstractContextManager[None]:
    """Keep other training runs out of folder; UsageError if one is there."""
    return file_lock(folder / ".train.lock", str(folder), by_process=True)


class DistributedContext:
    """The processes that train one model together; with a single process every method is a no-op.

    Gradients are summed once a step, after the last backward pass, and not by hooks during it: so batches may differ
    between processes in having images or not, and no process waits for a gradient that another one does not compute.
    """

    def __init__(self, device: torch.device, max_bucketed_bytes: int = MAX_BUCKETED_BYTES):
        """Join the process group that torchrun's environment describes, if any: NCCL between GPUs, else gloo.

        A group that the caller has initialized is used and left alone.
        """
        self.world_size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.device, self.max_bucketed_bytes, self.lock = device, max_bucketed_bytes, ExitStack()
        self.owns_group = self.world_size > 1 and not dist.is_initialized()
        if self.owns_group:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            # Imported before a group exists: defaults of its functions would keep the group, and gloo's threads, alive.
            from torch.distributed import nn as _  # noqa: F401

            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and the progress lines."""
        return self.rank == 0

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
        """Keep other runs out of folder until self.lock is left: UsageError if one is there.

        TrainingError on all processes unless what the main process writes into folder is there for all.
        """
        if self.is_main:
            self.lock.enter_context(training_lock(folder))
        if self.world_size == 1:
            return
        with TemporaryDirectory(prefix=".shared-", dir=folder) if self.is_main else nullcontext() as probe:
            message = [probe]  # the main process's, for all
            dist.broadcast_object_list(message, 0, device=self.device)
            (found,) = self.sum((folder / Path(str(message[0])).name).is_dir())
        if found < self.world_size:
            raise TrainingError(
                f"{folder} is not the same folder for all {self.world_size} processes: {found:.0f} see what the first "
                "one writes; name one on a file system that all hosts share"
            )

    def broadcast_weights(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        if self.world_size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum each gradient over the processes; one that no process has stays None, as in a single process."""
        if self.world_size == 1:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        counts = self.sum(*[p.grad is not None for p in trained])
        used = [p for p, count in zip(trained, counts) if count]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        small = [i for i, gradient in enumerate(gradients) if gradient.nbytes < self.max_bucketed_bytes]
        messages = [gradient for gradient in gradients if gradient.nbytes >= self.max_bucketed_bytes]
        if small:
            bucket = torch.cat([gradients[i].flatten() for i in small])
            messages.append(bucket)
            for i, part in zip(small, bucket.split([gradients[i].numel() for i in small])):
                gradients[i] = part.view_as(used[i])  # a view, so that it holds the sum afterwards
        for p, gradient in zip(used, gradients):
            p.grad = gradient
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in messages]:
            work.wait()

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
