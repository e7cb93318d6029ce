"""Captions of many pictures in one go: who reads, who speaks, who waits for whom, and what of it is shown."""

import io
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from nanovlm import Captioner, progress
from nanovlm.bulk import captioning as runs
from nanovlm.bulk.prefetch import Prefetch
from nanovlm.progress import Progress
from support.cli import NAMES, Terminal

pytestmark = pytest.mark.usefixtures("standing")


@pytest.fixture
def captioner(model_folder):
    return Captioner.from_pretrained(model_folder, "cpu", "float32")


@pytest.fixture
def pictures(folder):
    return [str(folder / name) for name in NAMES]


@pytest.fixture
def one_lane(monkeypatch):
    """As of a model that is not small."""
    monkeypatch.setattr(runs, "MOST_LANES", 1)


def test_pictures_are_prepared_while_the_model_runs(captioner, pictures, one_lane, monkeypatch):
    prepared, prepare, step, ahead, waited = [], captioner.prepare, runs.ContinuousBatch.step, threading.Event(), []

    def note(picture, prompt):
        prepared.append(picture)
        if len(prepared) == 3:
            ahead.set()
        return prepare(picture, prompt)

    monkeypatch.setattr(captioner, "prepare", note)
    monkeypatch.setattr(runs.ContinuousBatch, "step", lambda batch: waited.append(ahead.wait(60)) or step(batch))
    run = runs.BulkCaptioner(captioner, "?", {"max_new_tokens": 2})
    monkeypatch.setattr(run, "window", lambda rows: 3)
    run(pictures, 1, lambda *_: None, pytest.fail)
    assert all(waited) and run.done == len(prepared) == 5, "the next two, while the first is read"


@pytest.mark.parametrize("small, during", [(True, 1), (False, 3)])
def test_of_a_small_model_each_lane_has_one_core(captioner, pictures, monkeypatch, small, during):
    step, seen = runs.ContinuousBatch.step, set()
    monkeypatch.setattr(runs, "CORES", 2)
    monkeypatch.setattr(runs, "SMALL", 2**40 if small else 0)
    monkeypatch.setattr(runs.ContinuousBatch, "step", lambda batch: seen.add(torch.get_num_threads()) or step(batch))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for options in ({"max_new_tokens": 2}, {}):  # of which the second fails
            run = runs.BulkCaptioner(captioner, "?", options)
            with nullcontext() if options else pytest.raises(KeyError):
                run(pictures, 2, lambda *_: None, pytest.fail)
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {during} and run.done == 0


def test_a_short_caption_does_not_wait_for_a_long_one(captioner, pictures, one_lane, monkeypatch):
    order, step, steps = [], runs.ContinuousBatch.step, []

    def early(batch):
        """Every answer but the first picture's is short."""
        for answer in batch._waiting.values():
            answer.remaining = 30 if answer.key.endswith("a.png") else 2
        steps.append(batch.running)
        return step(batch)

    captioner.tokenizer.eos_token_id = None
    monkeypatch.setattr(runs.ContinuousBatch, "step", early)
    run = runs.BulkCaptioner(captioner, "?", {"max_new_tokens": 30})
    run(pictures, 2, lambda picture, _: order.append(picture), pytest.fail)
    assert [Path(picture).name for picture in order][-1] == "a.png" and len(order) == 5 and len(steps) <= 31


# ------------------------------------------------------------------------------------------------------------- in lanes


def test_lanes_share_the_pictures_and_say_what_one_says(captioner, pictures, monkeypatch):
    said, step, threads, together = [], runs.ContinuousBatch.step, set(), threading.Barrier(2, timeout=60)

    def both(batch):
        """The first step of each lane waits for the other's: neither may take all pictures."""
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            together.wait()
        return step(batch)

    for lanes in (1, 2):
        monkeypatch.setattr(runs, "CORES", lanes)
        run, found = runs.BulkCaptioner(captioner, "?", {"max_new_tokens": 8}), {}
        if lanes == 2:
            monkeypatch.setattr(runs.ContinuousBatch, "step", both)
        run(pictures, 2, found.__setitem__, pytest.fail)
        assert len(run.spent) == lanes and all(run.spent) and run.done == 5 and 0 < run.busy <= 1
        said.append(found)
    assert said[0] == said[1] and len(said[0]) == 5 and len(threads) == 2
    assert threading.get_ident() not in threads and not alive(threads)


def alive(threads):
    return [thread for thread in threading.enumerate() if thread.ident in threads]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_what_one_lane_raises_ends_the_others(error):
    threads = set()

    def lane(breaks):
        threads.add(threading.get_ident())
        for i in range(10**9):
            if breaks and i == 3:
                raise error
            yield i, ""

    with pytest.raises(type(error)) as raised:
        for _ in runs.together([lane(False), lane(True), lane(False)], 4):
            pass
    assert raised.value is error and len(threads) == 3 and not alive(threads)


def test_who_stops_listening_stops_the_lanes_and_has_missed_little():
    said, threads = [], set()

    def lane():
        threads.add(threading.get_ident())
        for i in range(10**9):
            said.append(i)
            yield i, ""

    answers = runs.together([lane(), lane()], 4)
    heard = [next(answers) for _ in range(10)]
    answers.close()
    assert len(heard) == 10 and len(said) <= 10 + 4 + 2 and not alive(threads), "4 wait to be heard, 1 in each lane"


def test_pictures_are_read_ahead_but_not_too_far():
    asked, read, gate = iter(range(10)), [], threading.Event()

    def look(picture):
        gate.wait(60)
        read.append(picture)
        return -picture

    with Prefetch(asked, look, 3, 1) as ahead:
        assert ahead.take(wait=False) is None, "none is read yet"
        assert next(asked) == 3, "the first three were asked for, no more"
        first, future = ahead.take(wait=True)
        gate.set()
        assert (first, future.result()) == (0, 0)
        ahead.again([first])
        took = [ahead.take(wait=True) for _ in range(9)]
        assert [(n, future.result()) for n, future in took] == [(n, -n) for n in range(10) if n != 3]
        assert ahead.take(wait=True) is None and read.count(0) == 2 and len(read) == 10


# -------------------------------------------------------------------------------------------------------- what is shown


def test_a_bar_is_for_terminals_and_lines_now_and_then_for_the_rest(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.delenv("TERM", raising=False)
    bar = Progress(200)
    for done in range(0, 201, 50):
        clock[0] += 30
        bar.show(done, "3 failed")
    bar.clear()
    assert "\r[#####---------------] 50/200  50 a minute  3:00 left  3 failed" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K") and "\n" not in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    lines = Progress(200)
    for done in range(201):
        clock[0] += 1
        lines.show(done)
    assert "\r" not in file.getvalue() and len(file.getvalue().splitlines()) == 7
    assert file.getvalue().startswith("29/200  58 a minute  2:57 left\n")
