"""Designs that share keys and values, trained on minGPT's sorting task until each sorts: compared at equal quality."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eval.lib.command import progress, table
from eval.lib.speculation import DIGITS, small_config, sort_cached, train
from eval.sort_task import splits
from models.kv_study.sharing import CrossLayerModel, LatentAttention
from models.language_model import LanguageModel

VALUES = 4  # of the sorting task's digits: 4,096 inputs, a quarter of which is held out
WIDTH, HEADS, BLOCKS, LATENT = 48, 4, 4, 12
MAX_STEPS, SEEDS, ENOUGH = 1200, 3, 0.995


@dataclass(frozen=True)
class Shared:
    """Results of one design; a list has one entry per seed."""

    design: str
    parameters: int
    bytes_per_token: float
    steps: list[int]  # until ENOUGH of the held-out inputs are sorted, or MAX_STEPS
    right: list[float]  # of the held-out inputs, with the cache


def make_model(design: str) -> LanguageModel:
    """A model of the same width, heads and blocks, whose cache is that of design."""
    kv_heads = {"GQA, 2 of 4 heads": 2, "MQA, 1 of 4 heads": 1, "CLA and MQA": 1}.get(design, HEADS)
    cfg = replace(small_config(VALUES, WIDTH, HEADS, BLOCKS), lm_n_kv_heads=kv_heads)
    model = CrossLayerModel(cfg) if design.startswith("CLA") else LanguageModel(cfg)
    for block in model.blocks if design.startswith("MLA") else ():
        block.add_module("attn", LatentAttention(cfg, LATENT))
    return model


def measure_sharing(max_steps: int = MAX_STEPS, seeds: int = SEEDS) -> list[Shared]:
    """Train every design from each seed."""
    data, test = splits(DIGITS, VALUES)
    rows = [(row.tolist(), row.sort().values.tolist()) for row in data]
    designs = ["MHA", "GQA, 2 of 4 heads", "MQA, 1 of 4 heads", "CLA", "CLA and MQA", f"MLA, latent of {LATENT}"]
    results = []
    for design in designs:
        steps, right, held = [], [], 0.0
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = make_model(design)
            is_done = partial(lambda model: sort_cached(model, test)[0] >= ENOUGH, model)
            steps.append(train(model, rows, max_steps, is_done))
            share, held = sort_cached(model.eval(), test)
            right.append(share)
            progress(f"sharing: {design}, seed {seed}: {steps[-1]} steps, {share:.1%}")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        results.append(Shared(design, parameters, held, steps, right))
    return results


def sharing_table(title: str, rows: Sequence[Shared]) -> str:
    cells = [["sorting task", "parameters", "bytes/token", "steps by seed", "sorted by seed"]]
    for row in rows:
        steps, right = " ".join(map(str, row.steps)), " ".join(f"{share:.1%}" for share in row.right)
        cells.append([row.design, f"{row.parameters:,}", f"{row.bytes_per_token:,.0f}", steps, right])
    return table(cells)
