"""Forward and backward passes over the batches of an optimizer step."""

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
) -> float:
    """Add up the gradients of the mean loss of the answer tokens of all batches, here and on other processes.

    Returns this process's share of that loss.
    """
    counts = [count_answer_tokens(batch) for batch in batches]
    if not all(counts):
        raise TrainingError("a batch has no answer tokens to learn; remove examples without an answer")
    (answer_tokens,) = context.sum(sum(counts))
    total = 0.0
    for batch, count in zip(batches, counts):
        with autocast(model.device, dtype):
            loss = model(**batch, targets_only=True)[1]
        loss = loss * (count / answer_tokens)
        if loss.requires_grad:  # not if only the projector is trained, and the batch has no images
            scaler.scale(loss).backward()
        total += loss.item()
    return total


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor if tensor is None else tensor.to(device) for name, tensor in batch.items()}


def count_tokens(batch: Batch) -> int:
    """The number of tokens without padding."""
    return int((batch["attention_mask"] != 0).sum())


def count_answer_tokens(batch: Batch) -> int:
    return int((batch["targets"] != IGNORE_INDEX).sum())
