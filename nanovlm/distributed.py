"""One run on several processes, as torchrun starts them: each takes every n-th batch, and gradients are summed."""

import os

import torch
import torch.distributed as dist
from torch import nn


class World:
    """The processes that train one model together; alone, it does nothing.

    Gradients are summed once a step, after the last backward pass, rather than by hooks within it: so a process may
    have read words alone, or many pictures, and none waits for a gradient that another does not have.
    """

    def __init__(self, device: torch.device):
        """Join the group that torchrun's environment names, if there is one: NCCL between GPUs, else gloo."""
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.device = device
        if self.size > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the processes, exact for integers up to 2^53."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def share_weights(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        for tensor in model.state_dict().values() if self.size > 1 else ():
            dist.broadcast(tensor, 0)

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum each gradient over the processes; one that no process has stays None, as it would for one alone."""
        if self.size == 1:
            return
        learning = [p for p in model.parameters() if p.requires_grad]
        waiting = []
        for p, owners in zip(learning, self.sum(*[p.grad is not None for p in learning])):
            if owners:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                waiting.append(dist.all_reduce(p.grad, async_op=True))
        for work in waiting:
            work.wait()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
