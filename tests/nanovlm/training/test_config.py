"""The settings of a run: the learning rate by its formula, and the limits of each setting."""

import argparse
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from nanovlm.cli.train import add_flags, config_from_args, options_from_args
from nanovlm.errors import InputError
from nanovlm.training import config
from nanovlm.training.config import AUTOMATIC, FINETUNING, MUON_LR, FinetuneOptions, TrainConfig
from nanovlm.training.finetuning import choose_settings


def test_the_learning_rate_rises_stays_constant_and_falls_to_0_with_ten_checkpoints():
    cfg = TrainConfig(max_steps=100, lr=2.0, warmup_steps=9, decay=0.4)
    rates = [cfg.lr_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[9:61] == [2.0] * 52
    assert rates[60:] == pytest.approx([2.0 * (100 - step) / 40 for step in range(60, 101)])
    assert {TrainConfig(max_steps=5, lr=2.0, warmup_steps=0, decay=0).lr_at(step) for step in range(5)} == {2.0}
    falling = TrainConfig(max_steps=4, lr=1.0, warmup_steps=0, decay=1)
    assert [falling.lr_at(step) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    short, long = (TrainConfig(max_steps=n, warmup_steps=20, decay=0.6) for n in (100, 850))
    assert all(short.lr_at(step) == long.lr_at(step) for step in range(20, 40))
    assert [TrainConfig(max_steps=n).interval for n in (3, 10, 850)] == [1, 1, 85]


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 10, 19, 25, 100, 200, 850])
def test_the_peak_is_reached_after_a_tenth_of_all_steps(steps):
    for warmup_steps, decay in product((0, 1, 20, 500), (0, 0.3, 0.6, 0.9)):
        cfg = TrainConfig(max_steps=steps, lr=2.0, warmup_steps=warmup_steps, decay=decay)
        assert cfg.warmup == min(warmup_steps, steps // 10)
        assert cfg.lr_at(cfg.warmup) == max(map(cfg.lr_at, range(steps))) == pytest.approx(2)


WRONG = [
    {"max_steps": 0}, {"batch_size": 0}, {"save_every": -1}, {"log_every": 0}, {"num_workers": -1},
    {"warmup_steps": -1}, {"lr": -1e-3}, {"lr": 0.0}, {"lr": math.nan}, {"lr": math.inf}, {"decay": 1.01},
    {"decay": -0.1}, {"weight_decay": -1}, {"max_grad_norm": math.nan}, {"max_grad_norm": 0.0}, {"lora_alpha": 0.0},
    {"beta2": 1.0}, {"seed": -1}, {"seed": 2**70}, {"optimizer": "sgd"}, {"dtype": "int8"}, {"freeze": ("head",)},
    {"freeze": ("vision", "projector", "language")}, {"optimizer": "muon", "lora_rank": 4},
    {"gradient_accumulation_steps": 0}, {"keep_checkpoints": 0}, {"augment": 0.5}, {"epochs": 0.0}, {"device": "x"},
    {"lora_rank": -1}, {"data": "photos"}, {"data": Path("photos")}, {"data": [{"image": "a.png"}]},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_value_out_of_range_is_named(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(InputError, match=f"^{re.escape(f'{name}={value}')}"):
        (TrainConfig if name in TrainConfig.__dataclass_fields__ else FinetuneOptions)(**wrong)


def parse(flags):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags.split())


KINDS = {  # flags -> the defaults of that kind of run
    "--model m": FINETUNING, "--model m --lora-rank 4": replace(config.ADAPTERS, lora_rank=4),
    "--backbones v l": config.JOINED, "--backbones v l --lora-rank 4": replace(config.JOINED_ADAPTERS, lora_rank=4),
    "--backbones v l --projector-lr 0": replace(config.JOINED, projector_lr=0.0), "--recipe scenes": config.SCENES,
}  # fmt: skip
FLAGS = [
    ("--seed 7", {"seed": 7}), ("--seed 0", {"seed": 0}), ("--dtype float32", {"dtype": "float32"}),
    ("--optimizer muon", {"optimizer": "muon"}), ("--optimizer adamw", {"optimizer": "adamw"}),
    ("--weight-decay 0.01", {"weight_decay": 0.01}), ("--warmup-steps 3", {"warmup_steps": 3}),
    ("--warmup-steps 0", {"warmup_steps": 0}), ("--gradient-checkpointing", {"gradient_checkpointing": True}),
    ("--no-gradient-checkpointing", {"gradient_checkpointing": False}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "setting"), FLAGS)
def test_a_flag_sets_its_setting_and_is_not_chosen(flags, setting):
    """And the other defaults are those of the kind of run."""
    assert all(config_from_args(parse(kind)) == chosen for kind, chosen in KINDS.items())
    args = parse(f"--data photos --out out {flags}")
    assert config_from_args(args) == replace(FINETUNING, **setting)
    options = options_from_args(args)
    assert set(options.automatic) == set(AUTOMATIC) - setting.keys()
    cfg, _ = choose_settings(options, config_from_args(args), 192, 10.0)
    assert {name: getattr(cfg, name) for name in setting} == setting
    assert cfg.lr == pytest.approx(FINETUNING.lr if cfg.optimizer == "adamw" else MUON_LR)
