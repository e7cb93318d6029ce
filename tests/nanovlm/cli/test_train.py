"""`nanovlm train` and train.py."""

from pathlib import Path

import pytest

from support.cli import assert_usage_error, flag_names

pytestmark = pytest.mark.usefixtures("workdir")


WRONG_TRAIN_FLAGS = [
    "--max-steps 0", "--max-steps 1.5", "--batch-size 0", "--lr -1", "--lr nan", "--lr x", "--warmup-steps -1",
    "--decay 1.1", "--augment 0.5", "--weight-decay -1", "--beta2 1", "--beta2 -0.1", "--max-grad-norm -1",
    "--seed -1", "--seed 99999999999999999999", "--save-every 0", "--log-every 0", "--num-workers -1",
    "--device tpu", "--recipe x",
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
