"""The sharing study: what each design caches, and that training ends when a model sorts."""

import pytest
import torch

from eval.lib import sharing_study
from eval.lib.sharing_study import Shared, make_model, sharing_table
from eval.lib.speculation import sort_cached, train


def test_bytes_are_those_of_each_design():
    inputs = torch.randint(4, (5, 6))
    designs = {"MHA": 4 * 2 * 4 * 12, "MQA, 1 of 4 heads": 4 * 2 * 12, "CLA": 2 * 2 * 4 * 12,
               "CLA and MQA": 2 * 2 * 12, "MLA, latent of 12": 4 * 24}  # fmt: skip
    assert {name: sort_cached(make_model(name).eval(), inputs)[1] for name in designs} == {
        name: 4 * numbers for name, numbers in designs.items()
    }


@pytest.mark.full
def test_training_ends_when_it_is_done_and_the_share_is_counted():
    torch.manual_seed(0)
    inputs = torch.tensor([[digit] * 6 for digit in range(4)])
    rows, model = [(row.tolist(), row.tolist()) for row in inputs], make_model("CLA and MQA")
    steps = train(model, rows, 400, lambda: sort_cached(model, inputs)[0] == 1)
    assert steps in (100, 200, 300) and sort_cached(model, inputs)[0] == 1
    with torch.no_grad():
        model.head.weight.zero_()
    assert sort_cached(model, inputs)[0] == 0.25, "zeros alone"
    table = sharing_table("", [Shared("CLA", 1000, 384.0, [100, 200], [1.0, 0.5])])
    assert "100 200" in table and "100.0% 50.0%" in table


@pytest.mark.full
def test_every_design_is_measured_by_seed():
    rows = sharing_study.measure_sharing(max_steps=2, seeds=2)
    assert len(rows) == 6 and all(row.steps == [2, 2] and len(row.right) == 2 for row in rows)
