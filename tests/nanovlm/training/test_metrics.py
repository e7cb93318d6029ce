"""The metrics of a run, against losses computed another way; a resumed run writes none twice and forgets none."""

import base64
import io
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from nanovlm.errors import MissingExtraError, TrainingError
from nanovlm.evaluation import Evaluation
from nanovlm.evaluation.evaluate import Answer, Question
from nanovlm.evaluation.report import write_report
from nanovlm.training.config import TrainConfig
from nanovlm.training.distributed import DistributedContext
from nanovlm.training.metrics import MetricsLogger, StepMetrics, check_installed, read_metrics, truncate
from support import ROOT
from support.logs import log_lines
from support.training import train

CFG = TrainConfig(
    max_steps=6, lr=3e-3, warmup_steps=2, save_every=3, log_every=2, validate_every=2, validation_batches=3,
    num_workers=0, dtype="float32",
)  # fmt: skip
IMAGES = [
    (Image.new(mode, (40, 30), color), word)
    for mode, color, word in (("RGB", "red", "red"), ("L", 99, "gray"), ("RGBA", "blue", "blue"))
]


def answer_questions(model, everything):
    """Answers that depend on the weights, half of them right, one with what HTML and TeX would take for markup."""
    weight = f"{model.MP.proj.weight.sum().item():.6f}"
    texts = ["$\\frac{1}$ <b>", f"gray {weight}", "blue", "none"]
    questions = [Question("mine", f"{i}.png", [image], "What color?", [word]) for i, (image, word) in enumerate(IMAGES)]
    questions.append(Question("mine", "text", [], "What color?", ["none"]))
    scores = [0.0, 0.0, 1.0, 1.0]
    return Evaluation([Answer(*one, {"exact_match": score}) for *one, score in zip(questions, texts, scores)])


@pytest.fixture
def learn(tiny_model, make_batch):
    """Train a tiny model into folder; the lines it logged."""

    def learn(folder, cfg=CFG, batch=make_batch, **options):
        with log_lines() as lines:
            train(tiny_model(), "{}", batch, cfg, folder, **options)
        return lines

    return learn


def held_out(make_batch):
    return lambda i: make_batch(100 + i, (4 + 9 * i, 6))


def test_every_step_is_a_line_of_numbers(learn, tiny_model, make_batch, tmp_path):
    lines = learn(tmp_path)
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert all(entry.keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "memory"} for entry in entries)
    assert [entry["lr"] for entry in entries] == [CFG.lr_at(step) for step in range(6)]
    model = tiny_model()
    _, loss = model(**make_batch(0))
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert entries[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert entries[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert all(entry["tokens_per_s"] > 0 and 2**20 < entry["memory"] < 2**40 for entry in entries)
    assert lines[1].startswith(f"step 4/6  loss {(entries[2]['loss'] + entries[3]['loss']) / 2:.4f}  ")
    assert all(" tokens/s  " in line and " MiB  " in line for line in lines if line.startswith("step"))


def test_pace_is_measured_by_the_clock(tmp_path):
    """Steps of half a second, and an evaluation of ten seconds that counts only in the mean of the progress line."""
    now = [0.0]
    context = DistributedContext(torch.device("cpu"))
    cfg = replace(CFG, max_steps=12, log_every=2)
    logger = MetricsLogger(tmp_path, cfg, first_step=8, context=context, clock=lambda: now[0])
    with log_lines() as lines:
        for step in (9, 10):
            logger.start_step()
            now[0] += 0.5
            logger.log_step(StepMetrics(step, loss=2.0, lr=0.1, grad_norm=1.0, tokens=100))
            if step == 9:
                now[0] += 10
                logger.log_evaluation(step, 1.5, [])
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry.get("tokens_per_s") for entry in entries] == [200.0, None, 200.0]
    assert lines[0] == "step 9/12  validation loss 1.5000"
    assert lines[1].startswith("step 10/12  loss 2.0000  lr 1.0e-01  5.50 s/step  18 tokens/s  ")


def test_after_five_steps_a_line_says_what_the_run_needs(tmp_path):
    """Steps of two seconds, but the first of nine; evaluations of 30 seconds and checkpoints of seven."""
    now = [0.0]
    context = DistributedContext(torch.device("cpu"))
    cfg = replace(CFG, max_steps=105, log_every=500, validate_every=50)
    logger = MetricsLogger(tmp_path, cfg, first_step=0, context=context, clock=lambda: now[0])
    now[0] += 30
    with log_lines() as lines:
        logger.log_evaluation(0, None, None)
        for step in range(1, 8):
            logger.start_step()
            now[0] += 9 if step == 1 else 2
            logger.log_step(StepMetrics(step, loss=2.0, lr=0.1, grad_norm=1.0, tokens=100))
            now[0] += 7
    (line,) = lines
    assert re.fullmatch(r"after 5 steps: peak memory [\d,]+ MiB, 2\.00 s/step, about 4 min left", line), line


def test_the_validation_loss_is_the_mean_over_all_held_out_answers(learn, tiny_model, make_batch, tmp_path):
    batch, shape = held_out(make_batch), {"lm_dropout": 0.5}
    model = tiny_model(**shape)
    with log_lines() as lines:
        train(model, "{}", make_batch, replace(CFG, keep_best=False), tmp_path, validation=batch)
    evaluations = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [0, 2, 4, 6]
    for entry, one in ((evaluations[0], tiny_model(**shape)), (evaluations[-1], model)):
        losses = []
        with torch.no_grad():
            for held in (batch(i) for i in range(3)):
                log_probs = one.eval()(**held)[0].log_softmax(-1)
                positions = (held["targets"] != -100).nonzero().tolist()
                losses += [-log_probs[b, t, held["targets"][b, t]].item() for b, t in positions]
        assert entry["validation_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert f"step 6/6  validation loss {evaluations[-1]['validation_loss']:.4f}" in lines


def test_evaluation_changes_no_weights(learn, make_batch, tmp_path):
    learn(tmp_path / "without")
    evaluated = {"validation": held_out(make_batch), "answer_questions": answer_questions}
    learn(tmp_path / "with", replace(CFG, keep_best=False), **evaluated)
    without, with_evaluation = (load_file(tmp_path / run / "model.safetensors") for run in ("without", "with"))
    assert all(torch.equal(without[name], with_evaluation[name]) for name in without)


def test_a_resumed_run_writes_the_metrics_of_an_uninterrupted_one(learn, make_batch, tmp_path):
    def failing(i):
        if i == 5:
            raise MemoryError
        return make_batch(i)

    def metrics(folder):
        entries = read_metrics(folder / "metrics.jsonl")
        return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "memory")} for entry in entries]

    options = {"validation": held_out(make_batch), "answer_questions": answer_questions}
    learn(tmp_path / "whole", **options)
    with pytest.raises(MemoryError):
        learn(tmp_path / "run", batch=failing, **options)
    assert metrics(tmp_path / "run")[-1]["step"] == 5
    learn(tmp_path / "run", **options)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_an_unfinished_line_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]
    truncate(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    truncate(tmp_path / "new", 2)
    assert (tmp_path / "new").read_text() == "", "so that a folder without write permission is noticed at the start"
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "new"}


def test_an_overflow_is_null_because_json_has_no_infinity(learn, tmp_path):
    learn(tmp_path, replace(CFG, dtype="float16", max_steps=1))
    (entry,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert entry["grad_norm"] is None and entry["loss"] > 0


def test_metrics_that_cannot_be_written_stop_the_run_with_one_line(learn, make_batch, tmp_path):
    def fill_disk(i):
        if i == 4:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        return make_batch(i)

    remedy = "No space left on device; free some disk space and .* from .*step-3"
    with pytest.raises(TrainingError, match=remedy) as caught:
        learn(tmp_path, batch=fill_disk)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["wandb", pytest.param("trackio", marks=pytest.mark.full)])
def test_a_tracker_gets_the_same_numbers_offline(learn, make_batch, tmp_path, monkeypatch, name):
    """A stand-in for the library, with the part of its interface that both share."""
    runs, logged, finished = [], [], []
    stand_in = SimpleNamespace(
        init=lambda **options: runs.append(options),
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: finished.append(True),
    )
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    learn(tmp_path / "run", replace(CFG, report_to=name), validation=held_out(make_batch))
    learn(tmp_path / "run", replace(CFG, report_to=name, max_steps=7), validation=held_out(make_batch))
    options, resumed = runs
    assert (options["resume"], resumed["resume"]) == ("never", "allow")
    assert (options["project"], options["name"], options["config"]["lr"]) == ("nanovlm", "run", CFG.lr)
    assert options.get("mode") == ("offline" if name == "wandb" else None) and finished == 2 * [True]
    entries = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [{"step": step} | values for step, values in logged] == entries


# Trains for two steps, and resumes for a third one; no connection may leave this machine.
TRACKED = """
import socket, sys
from pathlib import Path
from nanovlm.cli.main import run_verb

connect = socket.socket.connect
def guarded(self, address):
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
    return connect(self, address)
socket.socket.connect = guarded
flags = ["--data", "data", "--batch-size", "1", "--num-workers", "0", "--report-to", sys.argv[1], "--out", "out"]
for steps in ("2", "3"):
    assert run_verb("train", [*flags, "--max-steps", steps]) == 0
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_library_itself_writes_one_run_to_local_files(tmp_path, name):
    pytest.importorskip(name)
    (tmp_path / "data").mkdir()
    IMAGES[0].save(tmp_path / "data/a.png")
    (tmp_path / "data/a.txt").write_text("red")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO"))}
    env |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", TRACKED, name]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if name == "wandb":
        runs = sorted((tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"))
        assert len(runs) == 2 and len({path.name for path in runs}) == 1 and all(path.stat().st_size for path in runs)
        return
    with closing(sqlite3.connect(tmp_path / "trackio/nanovlm.db")) as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert len({run for run, *_ in rows}) == 1 and {name for _, name, *_ in rows} == {"out"}
    logged = [(step, json.loads(metrics)["loss"]) for _, _, step, metrics in rows]
    assert logged == [(entry["step"], entry["loss"]) for entry in read_metrics(tmp_path / "out/metrics.jsonl")]


def test_a_missing_tracker_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"nanovlm\[track\]"):
        check_installed(replace(CFG, report_to="wandb"))


def test_the_report_shows_curves_scores_and_answers_beside_references(learn, make_batch, tmp_path):
    learn(tmp_path, validation=held_out(make_batch), answer_questions=answer_questions)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    texts = [unescape(text) for text in re.findall(r">([^<]+)<", page)]
    assert "answer: $\\frac{1}$ <b>" in texts and "reference: red" in texts and "0.500" in texts
    (points,) = re.findall(r'<polyline points="([^"]*)" style="stroke:#9ab8e0"', page)[:1]
    losses = [entry["loss"] for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry]
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert len(heights) == 6 and heights.index(min(heights)) == losses.index(max(losses))
    pixels = [Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"base64,([^\"]+)", page)]
    assert len(pixels) == 6, "the worst and random ones"
    assert {image.size for image in pixels} == {(40, 30)} and pixels[0].getpixel((5, 5))[0] > 250
    assert "http" not in page and "stroke-dasharray" in page


def test_the_report_has_no_curve_of_a_metric_that_is_never_a_number(learn, tmp_path):
    answers = Evaluation([Answer(Question("s", "n", [], "q", ["r"]), "a", {"f1": 0.5, "mine": math.nan})])
    learn(tmp_path, answer_questions=lambda model, everything: answers)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">f1</text>" in page and ">mine</text>" not in page and "mine nan" in page


def test_a_report_is_a_page_whatever_names_and_texts_hold(tmp_path):
    question = Question("s", "a\udcff\"'>.png", [], "q\0\x1b[31m", ["</script><img src=x onerror=alert(1)>"])
    write_report(tmp_path / "report.html", "t\udcff", Evaluation([Answer(question, "a", {})]))
    page, tags = (tmp_path / "report.html").read_text(encoding="utf-8"), set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)
    parser.feed(page)
    assert "figcaption" in tags and not tags & {"img", "script"}
    assert all(c.isprintable() or c == "\n" for c in page) and "q\ufffd\ufffd[31m" in page


def test_a_report_never_fails_a_run(learn, tmp_path):
    def fail(model, everything):
        if everything:
            raise ValueError("no")
        return answer_questions(model, everything)

    lines = learn(tmp_path, answer_questions=fail)
    assert lines[-1] == "no report.html: ValueError: no"
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "report.html").exists()


def test_a_model_that_is_never_right_is_told(learn, tmp_path):
    wrong = Evaluation([Answer(Question("s", "n", [], "q", ["r"]), "a", {"exact_match": 0.0})])
    lines = learn(tmp_path, answer_questions=lambda model, everything: wrong)
    assert lines[-2:] == [
        "the final model's answers to 1 held-out question: exact match 0.0000",
        "no answer is exactly right: more --max-steps may be needed",
    ]
