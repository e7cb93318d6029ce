"""The least time that a stage needs on this machine: the roofline model (Williams et al. 2009)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from eval.lib.hardware import matmul_flops, memory_bandwidth
from models.config import VLMConfig
from models.vision_language_model import PrefillState, VisionLanguageModel


@dataclass(frozen=True)
class StageCost:
    """Weights that a stage reads once, and its floating-point operations."""

    weights: int
    flops: int

    def roofline_s(self, weight_bytes: float, dtype: torch.dtype) -> float:
        """Seconds to read the weights, or to compute in dtype, whichever is longer; weight_bytes is of one entry."""
        return max(self.weights * weight_bytes / memory_bandwidth(), self.flops / matmul_flops(dtype))


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
        "prefill": (model.decoder, lambda: model.decoder.head(model.decoder(embeddings, last_only=True)[0][:, -1])),
        "decode": (model.decoder, lambda: model.decode(ids[:, 0], state)),
    }
    costs = {}
    for name, (module, run) in stages.items():
        with FlopCounterMode(display=False) as counter:
            run()
        weights = sum(parameter.numel() for parameter in module.parameters())  # a tied head counts once
        costs[name] = StageCost(weights, counter.get_total_flops())
    return costs
