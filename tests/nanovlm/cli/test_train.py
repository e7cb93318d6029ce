"""`nanovlm train` and train.py."""

from pathlib import Path

import pytest

from nanovlm.training.config import EPOCHS, MAX_STEPS, MUON_LR
from support.cli import assert_usage_error, flag_names

pytestmark = pytest.mark.usefixtures("workdir")


WRONG_TRAIN_FLAGS = [
    "--max-steps 0", "--max-steps 1.5", "--batch-size 0", "--lr nan", "--freeze head", "--augment 0.5",
    "--lora-rank -1", "--save-every -1", "--num-workers -1", "--device tpu", "--recipe x",
]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG_TRAIN_FLAGS)
def test_wrong_flags_are_one_error_line_before_any_work(train, flags):
    result = train("--recipe", "scenes", "--out", "out", *flags.split())
    assert_usage_error(result, program="train.py")
    assert flag_names(flags) & set(result[2].replace("=", " ").split())
    assert not Path("out").exists()


@pytest.mark.parametrize("argv", [[], ["--recipe", "scenes"], ["--out", "out"]])
def test_required_flags(train, argv):
    assert_usage_error(train(*argv), "required", program="train.py")


def test_help_lists_every_flag(train):
    code, out, _ = train("--help")
    assert code == 0 and all(flags.split()[0] in out for flags in WRONG_TRAIN_FLAGS)
    assert all(f" {default:g}" in out for default in (MUON_LR, EPOCHS, MAX_STEPS)), "what --data chooses among"
