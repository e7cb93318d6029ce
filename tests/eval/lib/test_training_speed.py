"""The measurements of training speed: timers change nothing, and another repository's packages stay apart."""

import re
import sys

import pytest
import torch
from torch.nn import functional

from eval.finetune import main
from eval.lib.training_profile import STAGES, StageTimer
from eval.lib.training_race import RaceResult, TrainingSetup, race_table, shape_config, started
from eval.peers.training_peers import attention_with_mask_and_causal, cosine_rate, imported_from
from models.vision_language_model import empty_model

CHECKOUT = {
    "models/vision_language_model.py": """
from torch import nn
from models.config import WIDTH

class VisionLanguageModel(nn.Module):
    tokenizer = None

    def __init__(self):
        super().__init__()
        self.vision_encoder, self.MP, self.decoder = nn.Linear(1, 1), nn.Linear(1, 1), nn.Embedding(700, WIDTH)
        self.head = nn.Linear(WIDTH, 700)

    @classmethod
    def from_pretrained(cls, folder):
        return cls()

    def forward(self, input_ids, images, attention_mask=None, targets=None):
        logits = self.head(self.decoder(input_ids))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
""",
    "models/config.py": "WIDTH = 8\n",
    "data/collators.py": """
import torch

class VQACollator:
    def __init__(self, tokenizer, max_length):
        self.max_length = max_length

    def __call__(self, batch):
        out = {"images": [item["images"] for item in batch]}
        for name, value in {"input_ids": 0, "labels": -100, "attention_mask": 0}.items():
            rows = [torch.nn.functional.pad(i[name], (self.max_length - len(i[name]), 0), value=value) for i in batch]
            out[name] = torch.stack(rows)
        return out
""",
}


@pytest.fixture
def checkout(tmp_path):
    for name, text in CHECKOUT.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


def test_a_timed_step_learns_what_a_plain_one_does(tmp_path):
    setup, weights = TrainingSetup.make(tmp_path, "embedded", 4, dtype="float32", batch_size=2), []
    for timed in (False, True):
        timer, trainer = StageTimer(), setup.trainer(tmp_path / f"run-{timed}", 2)
        with started(trainer) as batches:
            if timed:
                timer.attach(trainer)
            trainer.training_step(0, timer.timed_batches(batches) if timed else batches)
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert list(timer.seconds) == list(STAGES) and all(seconds > 0 for seconds in timer.seconds.values())


def test_the_profile_is_a_table_of_all_stages(capsys):
    assert main(["--profile", "--images", "4", "--batch-size", "2", "--steps", "1", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{stage} " in out for stage in STAGES) and "100.0%" in out and "tokens/s, 3,411,968 parameters" in out
    assert re.search(r"^\d+ GFLOP/s, \d+% of this machine's in a matmul alone$", out, re.MULTILINE)


def test_another_loop_takes_turns_with_ours(capsys, checkout):
    flags = ["--images", "4", "--batch-size", "2", "--steps", "2", "--dtype", "float32"]
    assert main(["--baseline", "nanovlm", "--nanovlm", str(checkout), *flags]) == 0
    out = capsys.readouterr().out
    assert "this project  nanovlm" in out and "tokens/s" in out


def test_the_packages_of_a_checkout_do_not_stay(checkout):
    def ours():
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("models", "data")}

    before = ours()
    with imported_from(checkout):
        from models.config import WIDTH  # theirs

        assert WIDTH == 8
    assert ours() == before


def test_a_missing_checkout_is_a_sentence(capsys):
    wrong = {"needs --nanovlm PATH": [], "nowhere has no models/vision_language_model.py": ["--nanovlm", "nowhere"]}
    for message, flags in wrong.items():
        assert main(["--baseline", "nanovlm", *flags]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


def test_a_mask_beside_is_causal_hides_both(tmp_path):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 8)
    padding = torch.tensor([[0.0, 0, 1, 1, 1], [1.0, 1, 1, 1, 1]])
    with attention_with_mask_and_causal():
        mask = (1 - padding[:, None, None]) * torch.finfo(torch.float32).min
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    visible = torch.ones(5, 5, dtype=torch.bool).tril() & (padding[:, None, None] > 0)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(y[0, :, 2:], expected[0, :, 2:])
    torch.testing.assert_close(y[1], expected[1])
    assert y.isfinite().all(), "padding must not become NaN"


def test_the_cosine_warms_up_and_ends_at_a_tenth():
    rates = [cosine_rate(step, 1.0, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 30) and max(rates) == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-4)


def test_the_table_gives_each_run_the_losses_of_each_fifth():
    fast = RaceResult("fast", 100, [1.0] * 20, [float(i) for i in range(20)])
    slow = RaceResult("slow", 100, [4.0] * 5, [9.0] * 5)
    lines = [line.split() for line in race_table([fast, slow]).splitlines()]
    assert lines[0] == ["fast", "slow"] and lines[1] == ["steps", "20", "5"]
    assert lines[3] == ["tokens/s", "100", "25"]
    assert [line[-2:] for line in lines[4:9]] == [[f"{4 * i + 1.5:.3f}", "9.000"] for i in range(5)]
    assert len(lines) == 9


def test_the_222m_shape_has_the_published_layers():
    """The format's tokens for images make the vocabulary 66 rows longer."""
    cfg = shape_config("222M")
    parameters = sum(p.numel() for p in empty_model(cfg, -1).parameters())
    assert parameters == 222_081_600 + 66 * 576 and cfg.vit_grid == 14 and isinstance(cfg.lm_vocab_size, int)


@pytest.mark.slow
def test_trl_learns_the_same_scenes(capsys):
    pytest.importorskip("trl")
    assert main(["--baseline", "trl", "--images", "4", "--batch-size", "2", "--steps", "2"]) == 0
    assert "this project  trl" in capsys.readouterr().out
