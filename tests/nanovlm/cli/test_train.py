"""`nanovlm train` and train.py."""

from pathlib import Path

import pytest

from nanovlm.training.config import EPOCHS, MAX_STEPS, MUON_LR
from support.cli import assert_usage_error

pytestmark = pytest.mark.usefixtures("workdir")


WRONG = {  # flags -> words of the error
    "": "required",
    "--recipe scenes": "required",
    "--out out": "required",
    "--data . --recipe scenes --out out": "exclude each other",
    "--data . --out out --epochs 1 --max-steps 5": "exclude each other",
    "--data . --out out --metric f1 --validation 0": "--metric has no effect",
    "--recipe scenes --out out --pack 9": "--pack has no effect",
    "--recipe scenes --out out --images .": "--images has no effect",
    "--recipe x --out out": "--recipe",
    "--data . --out out --optimizer muon --lora-rank 4": "--optimizer muon trains whole matrices",
    "--config nowhere": "--config nowhere: No such file",
    "--config list.json": "must hold an object",
    "--config odd.json": "'nonsense', which is no setting of a run",
    "--data nowhere --out out": "--data nowhere: no such file or folder",
}
WRONG |= {
    f"--recipe scenes --out out {flags}": flags.split()[0]
    for flags in (
        "--max-steps 0", "--max-steps 1.5", "--batch-size 0", "--lr nan", "--freeze head", "--augment 0.5",
        "--lora-rank -1", "--save-every -1", "--num-workers -1", "--device tpu",
        "--seed -1", "--seed x", "--dtype int8", "--optimizer sgd", "--weight-decay -1", "--warmup-steps -1",
    )
}  # fmt: skip


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_use_is_one_line_before_any_work(train, flags):
    Path("list.json").write_text("[]")
    Path("odd.json").write_text('{"nonsense": 1}')
    assert_usage_error(train(*flags.split()), WRONG[flags], program="train.py")
    assert not Path("out").exists()


def test_help_names_the_defaults(train):
    code, out, _ = train("--help")
    assert code == 0 and all(f" {default:g}" in out for default in (MUON_LR, EPOCHS, MAX_STEPS))
