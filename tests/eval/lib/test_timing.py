"""Contestants take turns, and warm-up does not count."""

from eval.lib.timing import interleave, measure_seconds


def test_contestants_take_turns_after_warming_up():
    calls = []

    def contestant(name, seconds):
        return lambda: calls.append(name) or seconds.pop()

    contestants = {"a": contestant("a", [6.0, 9.0, 1.0, 50.0]), "b": contestant("b", [2.0, 1.0, 3.0, 50.0])}
    lines = []
    timings = interleave(contestants, rounds=3, warmup=1, log=lines.append)
    assert calls == ["a", "b"] * 4 and timings == {"a": [1.0, 9.0, 6.0], "b": [3.0, 1.0, 2.0]}
    assert lines[0] == "round 1/3: a, 1.000 s" and len(lines) == 6
    assert measure_seconds(calls.clear) > 0 and calls == []
