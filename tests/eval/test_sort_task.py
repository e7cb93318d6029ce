"""eval.sort_task: the split is fixed, accuracy counts held-out inputs, and outputs are compared one by one."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from eval.sort_task import SortTask, accuracy, compare, main, sort_task, splits


def test_the_split_covers_all_inputs_and_is_the_same_in_every_run():
    train, test = splits(6, 3)
    rows = ["".join(map(str, row)) for row in [*train.tolist(), *test.tolist()]]
    assert len(rows) == len(set(rows)) == 3**6 and len(test) == 193
    assert rows[:2] == ["000002", "000012"] and rows[-193:][:2] == ["000000", "000001"]


class Oracle:
    """Sorts all inputs but those that begin with a given digit."""

    def __init__(self, fails_on=None):
        self.fails_on = fails_on

    def generate(self, idx, n, temperature=1.0, do_sample=False):
        answer = idx.sort(1).values
        answer[idx[:, 0] == self.fails_on, -1] += 1
        return torch.cat([idx, answer], dim=1)

    generate_kv = generate


def test_whole_outputs_are_counted_and_so_are_different_ones():
    inputs = torch.cat(splits(3, 3))
    assert accuracy(Oracle(), inputs) == 1
    assert accuracy(Oracle(fails_on=1), inputs) == pytest.approx(2 / 3)
    assert compare(Oracle(), Oracle(), inputs, sampled=False)[0] == 27
    assert compare(Oracle(), Oracle(fails_on=2), inputs, sampled=False)[0] == 18


def test_a_short_sorting_task_is_learned_on_its_threads_and_keeps_the_random_state(request, monkeypatch):
    monkeypatch.setattr("eval.sort_task.EVAL_INTERVAL", 25)
    counts = []
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)  # and not in the task: two threads that share a core wait for each other at every step
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    monkeypatch.setattr("eval.sort_task.progress", lambda line: counts.append(torch.get_num_threads()))
    result = sort_task(max_steps=300, length=3, n_digits=2, rounds=1, n_tokens=4, threads=1)
    assert torch.equal(torch.rand(1), expected) and set(counts) == {1} and torch.get_num_threads() == 2
    assert result.accuracy == 1 and not result.failures
    assert result.n_inputs == result.n_identical == result.n_identical_sampled == 8


@pytest.mark.parametrize(
    ("changes", "message", "failure"),
    [
        ({"accuracy": 0.5}, "sorts 50.0% of 193", "not sorted after 300 steps: raise --steps"),
        ({"n_identical": 728}, "728 of 729", "the cache changes the output"),
        ({"n_identical_sampled": 727}, "727 of 729", "the cache changes the output"),
        ({"long_identical": False}, "OTHER TOKENS", "the cache changes the output"),
    ],
)
def test_a_failure_is_a_sentence_and_exit_code_1(capsys, monkeypatch, changes, message, failure):
    result = SortTask(1.0, 300, 193, 729, 729, 729, 1.0, 1.0, [1.9, 2.1], [0.5, 0.5], True)
    monkeypatch.setattr("eval.sort_task.sort_task", lambda *args, **kwargs: replace(result, **changes))
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert message in out and failure in err and "torch" in out
    assert "without KV caching: 2.000 +- 0.100 s" in out and "with KV caching:    0.500 +- 0.000 s, 4.00x" in out


@pytest.mark.slow
def test_gpt_nano_sorts_and_its_cache_changes_nothing(results_of):
    record = results_of(main)
    assert record["accuracy"] == 1
    assert record["n_identical"] == record["n_identical_sampled"] == record["n_inputs"] == 729
