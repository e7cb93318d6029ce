"""eval.perplexity on the embedded model: what it compares, and what it prints."""

import pytest
import torch

from eval.perplexity import PRECISIONS, compare, main, results_table
from nanovlm import EMBEDDED


@pytest.mark.parametrize("step", [1, 2])
def test_predictions_are_compared_with_the_reference(step):
    vocabulary, ids, seen = 4, [0, 1, 2, 3, 0], []
    logits = torch.randn(len(ids), vocabulary, generator=torch.Generator().manual_seed(0))
    reference = logits.log_softmax(-1)

    def append(new):
        seen.extend(new[0])
        return logits[None, len(seen) - 1]

    figures = compare(append, ids, reference, step)
    ends = range(step, len(ids), step)
    loss = -sum(reference[end - 1, ids[end]] for end in ends) / len(ends)
    assert seen == ids[: ends[-1]] and figures["same_choice"] == 1
    assert figures["perplexity"] == pytest.approx(loss.exp().item()) and figures["kl"] == pytest.approx(0, abs=1e-6)
    uniform = compare(lambda _: torch.zeros(1, vocabulary), ids, reference, step)
    assert uniform["perplexity"] == pytest.approx(vocabulary) and uniform["kl"] > 0


def test_every_precision_is_measured(results_of, tmp_path):
    (tmp_path / "text.txt").write_text("A red ring is left of a blue square. " * 4)
    flags = ["--model", str(EMBEDDED), "--text", str(tmp_path / "text.txt"), "--tokens", "40", "--step", "3"]
    results = results_of(main, *flags, "--save", str(tmp_path / "out"))["results"]
    assert [*results] == ["float32, plain modules", *(" ".join(filter(None, pair)) for pair in PRECISIONS)]
    assert abs(results["float32"]["kl"]) < 1e-5 and results["float32"]["same_choice"] == 1
    assert 0 < results["float32 int8"]["kl"] < 0.1
    assert results_table(results) in next((tmp_path / "out").iterdir()).read_text()
