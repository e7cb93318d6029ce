"""Direct preference optimization (Rafailov et al. 2023): a chosen answer becomes likelier than a rejected one."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from models.vision_language_model import IGNORE_INDEX, VisionLanguageModel
from nanovlm.errors import TrainingError
from nanovlm.training.loader import Batch

CHOSEN, REJECTED = 2, 3  # attention mask values of the two continuations, see EncodedExample


class PreferenceObjective:
    """The loss -log sigmoid(beta * (policy's log-ratio - reference's)), mean over the rows of a batch.

    A log-ratio is log p(chosen) - log p(rejected), both summed over the answer's tokens. The reference is the model as
    it is now; it shares the parameters that are not trained.
    """

    def __init__(self, model: VisionLanguageModel, beta: float):
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.reference, self.beta = copy.deepcopy(model, frozen).eval().requires_grad_(False), beta

    @staticmethod
    def count(batch: Batch) -> int:
        """By what the loss of a batch is weighted: its rows. TrainingError for one without two answers."""
        mask = batch["attention_mask"]
        assert mask is not None
        has_pair = (mask == CHOSEN).any(1) & (mask == REJECTED).any(1)
        if not has_pair.all():
            raise TrainingError("an example has no chosen and rejected answer; train on others without --dpo-beta")
        return len(mask)

    def loss(self, model: VisionLanguageModel, batch: Batch) -> Tensor:
        with torch.no_grad():
            reference = log_ratios(self.reference, batch)
        return -F.logsigmoid(self.beta * (log_ratios(model, batch) - reference)).mean()


def log_ratios(model: VisionLanguageModel, batch: Batch) -> Tensor:
    """log p(chosen) - log p(rejected) of each row, (B,) float32."""
    targets, mask = batch["targets"], batch["attention_mask"]
    assert targets is not None and mask is not None
    logits, _ = model(**batch, targets_only=True)
    rows, columns = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    log_p = -F.cross_entropy(logits.float(), targets[rows, columns], reduction="none")
    sign = (mask[rows, columns] == CHOSEN).float() * 2 - 1
    return log_p.new_zeros(len(targets)).index_add(0, rows, sign * log_p)
