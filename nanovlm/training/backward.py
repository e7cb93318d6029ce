"""Forward and backward passes over the batches of an optimizer step."""

from typing import Protocol

import torch

from models.vision_language_model import VisionLanguageModel
from nanovlm.data.examples import IGNORE_INDEX
from nanovlm.errors import TrainingError
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.loader import Batch


@torch.enable_grad()
def backward(
    model: VisionLanguageModel,
    batches: list[Batch],
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler,
    context: DistributedContext,
    objective: "Objective | None" = None,
) -> float:
    """Add up the gradients of an objective's mean loss over all batches, here and on other processes.

    By default it is that of the answer tokens. Returns this process's share of that loss.
    """
    objective = objective or AnswerObjective()
    counts = [objective.count(batch) for batch in batches]
    if not all(counts):
        raise TrainingError("a batch has no answer tokens to learn; remove examples without an answer")
    (answer_tokens,) = context.sum(sum(counts))
    total = 0.0
    for batch, count in zip(batches, counts):
        with autocast(model.device, dtype):
            loss = objective.loss(model, batch)
        loss = loss * (count / answer_tokens)
        if loss.requires_grad:  # not if only the projector is trained, and the batch has no images
            scaler.scale(loss).backward()
        total += loss.item()
    return total


class Objective(Protocol):
    """What is learned from a batch: a mean loss, over as many things as `count` says."""

    def count(self, batch: Batch) -> int: ...
    def loss(self, model: VisionLanguageModel, batch: Batch) -> torch.Tensor: ...


class AnswerObjective:
    """The mean cross-entropy of the answer tokens."""

    def count(self, batch: Batch) -> int:
        return count_answer_tokens(batch)

    def loss(self, model: VisionLanguageModel, batch: Batch) -> torch.Tensor:
        return model(**batch, targets_only=True)[1]


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor if tensor is None else tensor.to(device) for name, tensor in batch.items()}


def count_tokens(batch: Batch) -> int:
    """The number of tokens without padding."""
    return int((batch["attention_mask"] != 0).sum())


def count_answer_tokens(batch: Batch) -> int:
    return int((batch["targets"] != IGNORE_INDEX).sum())
