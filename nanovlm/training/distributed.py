"""One run on several processes, as torchrun starts them: each takes every n-th batch, and gradients are summed."""

import os
import sys
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its functions' defaults would keep the group, and gloo's threads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from models.vision_language_model import VisionLanguageModel
from nanovlm.training.config import TrainConfig
from nanovlm.training.optimizer import freeze

SMALL = 2**20  # bytes: smaller gradients are summed in one go, as each message takes a time of its own


class DistributedContext:
    """The processes that train one model together; alone, it does nothing.

    Gradients are summed once a step, after the last backward pass, rather than by hooks within it: so a process may
    have read words alone, or many pictures, and none waits for a gradient that another does not have. After `shard`
    it is FSDP2 that sums, and all that is read of the model as a whole goes through `whole` and `gathered`.
    """

    def __init__(self, device: torch.device):
        """Join the group that torchrun's environment names, if there is one: NCCL between GPUs, else gloo."""
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.device, self.sharded = device, False
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

    def shard(self, model: VisionLanguageModel) -> None:
        """Leave each process its part of every weight, and so of its gradient and moments (Zhao et al. 2023).

        A block of the language model is whole only while it computes. All else is whole during a step: so a process
        that reads no picture still takes part when the encoder's weights are gathered, and its gradients summed.
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(f"fsdp=True needs a newer torch than {torch.__version__}; leave fsdp out, or upgrade")
        self.sharded, mesh = True, init_device_mesh(self.device.type, (self.size,))
        for module in (*model.decoder.blocks, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # the loss is that of all processes already
            module.set_force_sum_reduction_for_comms(True)
        model.set_reduce_scatter_unused_params(True)

    def sum_gradients(self, model: nn.Module, images: int) -> None:
        """Sum each gradient over the processes; one that no process has stays None, as it would for one alone.

        images is the number of images that this process has read.
        """
        if self.size == 1:
            return
        if self.sharded:
            (read,) = self.sum(images)
            for p in () if read else (*model.vision_encoder.parameters(), *model.MP.parameters()):
                p.grad = None  # FSDP2 says 0, by which AdamW would move
            return
        learning = [p for p in model.parameters() if p.requires_grad]
        owners = self.sum(*[p.grad is not None for p in learning])
        found = [p for p, n in zip(learning, owners) if n]
        for p in found:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        messages = [p.grad for p in found if p.nbytes >= SMALL]
        if small := [p for p in found if p.nbytes < SMALL]:
            messages.append(flat := torch.cat([p.grad.flatten() for p in small]))
            for p, part in zip(small, flat.split([p.numel() for p in small])):
                p.grad = part.view_as(p)  # so that it is summed where flat is
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in messages]:
            work.wait()

    def turns(self, n: int) -> range:
        """Which of n batches of no step are this process's; of sharded weights, the first has a whole copy."""
        return range(0 if self.rank else n) if self.sharded else range(self.rank, n, self.size)

    def gathered(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Names and whole tensors, for the first process; each must ask for the same."""
        found = {}
        for name, tensor in tensors:
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                found[name] = tensor
        return found

    def whole(self, model: VisionLanguageModel, cfg: TrainConfig) -> VisionLanguageModel:
        """The model, or a copy of a sharded one, for the first process; each must ask for it."""
        if not self.sharded:
            return model
        state = self.gathered(model.state_dict().items())
        if self.rank:
            return model
        with torch.device("meta"):
            copy = VisionLanguageModel(model.cfg, model.image_token_id)
            freeze(copy, cfg)
        copy.load_state_dict(state, assign=True)
        copy.decoder.tie_weights()
        return copy.train(model.training)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def run_and_exit(run: Callable[[], int]) -> int:
    """run's exit code; one of several processes ends with it at once, also where run exits by itself.

    FSDP2 keeps gloo's threads beyond the end of the group, and they can abort an interpreter that goes down.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return run()
    try:
        code = run()
    except SystemExit as error:
        code = error.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """tensor where other is, and in parts if other is."""
    tensor = tensor.to(other.device)
    if isinstance(other, DTensor) and tensor.ndim:
        return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
    return tensor
