"""What a run tells is what it did: losses computed another way, nothing said twice or forgotten after a stop."""

import builtins
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from nanovlm.errors import TrainingError
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import train
from nanovlm.training.metrics import read_metrics, truncate
from nanovlm.training.report import write_report
from support.logs import log_lines

CFG = TrainConfig(
    max_steps=6, lr=3e-3, warmup_steps=2, save_every=3, log_every=2, validate_every=2, validation_batches=3,
    num_workers=0, dtype="float32",
)  # fmt: skip
PICTURES = [Image.new(mode, (40, 30), colour) for mode, colour in (("RGB", "red"), ("L", 99), ("RGBA", "blue"))]


def show(model):
    """Pictures, and words that tell which model saw them."""
    return [(picture, f"{i} {model.MP.proj.weight.sum().item():.6f}") for i, picture in enumerate(PICTURES)]


@pytest.fixture
def learn(tiny_model, words_and_images):
    """Train a tiny model into folder; the lines it logged."""

    def learn(folder, cfg=CFG, batch=words_and_images, **options):
        with log_lines() as lines:
            train(tiny_model(), "{}", batch, cfg, folder, **options)
        return lines

    return learn


def held_out(words_and_images):
    return lambda i: words_and_images(100 + i, (4 + 9 * i, 6))


def test_every_step_is_a_line_of_numbers(learn, tiny_model, words_and_images, tmp_path):
    lines = learn(tmp_path)
    told = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in told] == [1, 2, 3, 4, 5, 6]
    assert all(entry.keys() == {"step", "loss", "lr", "grad_norm", "tokens_per_s", "memory"} for entry in told)
    assert [entry["lr"] for entry in told] == [CFG.lr_at(step) for step in range(6)]
    model = tiny_model()
    _, loss = model(**words_and_images(0))
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert told[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert told[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert all(entry["tokens_per_s"] > 0 and 2**20 < entry["memory"] < 2**40 for entry in told)
    assert lines[1].startswith(f"step 4/6  loss {(told[2]['loss'] + told[3]['loss']) / 2:.4f}  ")
    assert all(" tokens/s  " in line and " MiB  " in line for line in lines)


def test_the_validation_loss_is_the_mean_over_all_held_out_answers(learn, tiny_model, words_and_images, tmp_path):
    batch, shape = held_out(words_and_images), {"lm_dropout": 0.5}
    model = tiny_model(**shape)
    with log_lines() as lines:
        train(model, "{}", words_and_images, CFG, tmp_path, validation=batch)
    found = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in entry]
    assert [entry["step"] for entry in found] == [0, 2, 4, 6]
    for entry, one in ((found[0], tiny_model(**shape)), (found[-1], model)):
        losses = []
        with torch.no_grad():
            for held in (batch(i) for i in range(3)):
                likely = one.eval()(**held)[0].log_softmax(-1)
                places = (held["targets"] != -100).nonzero().tolist()
                losses += [-likely[b, t, held["targets"][b, t]].item() for b, t in places]
        assert entry["validation_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert f"step 6/6  validation loss {found[-1]['validation_loss']:.4f}" in lines


def test_looking_changes_nothing(learn, words_and_images, tmp_path):
    learn(tmp_path / "blind")
    learn(tmp_path / "seeing", validation=held_out(words_and_images), caption_images=show)
    blind, seeing = (load_file(tmp_path / run / "model.safetensors") for run in ("blind", "seeing"))
    assert all(torch.equal(blind[name], seeing[name]) for name in blind)


def test_a_resumed_run_tells_what_an_uninterrupted_one_tells(learn, words_and_images, tmp_path):
    def dies(i):
        if i == 5:
            raise MemoryError
        return words_and_images(i)

    def told(folder):
        return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "memory")}
                for entry in read_metrics(folder / "metrics.jsonl")]  # fmt: skip

    options = {"validation": held_out(words_and_images), "caption_images": show}
    learn(tmp_path / "whole", **options)
    with pytest.raises(MemoryError):
        learn(tmp_path / "run", batch=dies, **options)
    assert told(tmp_path / "run")[-1]["step"] == 5
    learn(tmp_path / "run", **options)
    assert told(tmp_path / "run") == told(tmp_path / "whole")


def test_a_line_that_was_cut_off_is_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]
    truncate(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    truncate(tmp_path / "new", 2)
    assert (tmp_path / "new").read_text() == "", "so that a folder that cannot be written is found at once"
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "new"}


def test_an_overflow_is_null_since_json_knows_no_infinity(learn, tmp_path):
    learn(tmp_path, replace(CFG, dtype="float16", max_steps=1))
    (entry,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert entry["grad_norm"] is None and entry["loss"] > 0


def test_numbers_that_cannot_be_written_stop_with_a_sentence(learn, words_and_images, tmp_path):
    def fills(i):
        if i == 4:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        return words_and_images(i)

    with pytest.raises(
        TrainingError, match="No space left on device; free some disk space and .* from .*step-3"
    ) as caught:
        learn(tmp_path, batch=fills)
    assert "\n" not in str(caught.value)


def test_tensorboard_shows_the_same_curves(learn, words_and_images, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learn(tmp_path, replace(CFG, tensorboard=True), validation=held_out(words_and_images))
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("loss", "lr", "grad_norm", "validation_loss"):
        told = [(entry["step"], entry[name]) for entry in read_metrics(tmp_path / "metrics.jsonl") if name in entry]
        assert [(e.step, e.value) for e in board.Scalars(name)] == [(step, pytest.approx(x)) for step, x in told]


def test_the_report_shows_curves_and_pictures_with_their_first_and_last_captions(learn, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (drawn.append(figure), save(figure, *args, **kw))
    )
    learn(tmp_path, caption_images=show)
    captions = [entry["captions"] for entry in read_metrics(tmp_path / "metrics.jsonl") if "captions" in entry]
    assert len(captions) == 4 and captions[0] != captions[-1]
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    for before, after, picture in zip(captions[0], captions[-1], PICTURES):
        axes = drawn[0].axes[titles.index(f"before: {before}\nafter: {after}")]
        shown = axes.images[0].get_array()
        assert shown.shape == (30, 40, 3) and tuple(shown[0, 0]) == picture.convert("RGB").getpixel((0, 0))
    (losses,) = [axes for axes in drawn[0].axes if axes.get_title() == "loss"]
    told = [entry["loss"] for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry]
    assert list(losses.lines[0].get_ydata()) == told
    assert Image.open(tmp_path / "report.png").size == (1200, 680)
    (tmp_path / "report.png").unlink()
    write_report(tmp_path)
    assert Image.open(tmp_path / "report.png").size == (1200, 320)


def test_without_matplotlib_there_is_no_report_but_a_line_and_a_model(learn, tmp_path, monkeypatch):
    load = builtins.__import__

    def missing(name, *args):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    lines = learn(tmp_path, caption_images=show)
    assert lines[-1] == "no report.png: No module named 'matplotlib'; pip install 'nanovlm[eval]'"
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "report.png").exists()
