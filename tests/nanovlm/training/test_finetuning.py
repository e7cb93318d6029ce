"""train.py --data as a user meets it: what it learns, what it shows, and what it says of data it cannot use."""

import json
import os
import random
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.checkpoint import checkpoint_dtype, save_checkpoint
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, Captioner
from nanovlm.cli import main as cli
from nanovlm.data import Batches
from nanovlm.data.examples import Example, encode
from nanovlm.synthetic import caption, draw, random_scene
from nanovlm.training.config import ADAPTERS, FINETUNING, SCENES
from support.cli import refused

QUICK = ["--steps", "3", "--batch-size", "4", "--workers", "0", "--device", "cpu", "--out", "out"]
LABEL = "A photograph of my cat."


@pytest.fixture(autouse=True)
def standing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()


@pytest.fixture
def train(monkeypatch, capsys):
    """train.py in this process: exit code, stdout, stderr."""

    def train(*argv):
        monkeypatch.setattr(sys, "argv", ["train.py"])
        try:
            code = cli.run_verb("train", [str(arg) for arg in argv])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return train


def scenes(n, text=None):
    """n drawn scenes with their captions, or one text for all."""
    for i in range(n):
        scene = random_scene(random.Random(i))
        draw(scene, 96, 96).save(f"mine/{i}.png")
        Path(f"mine/{i}.txt").write_text(f"{text or caption(scene)}\n")


def test_a_few_steps_teach_the_embedded_model_and_generate_says_it(train):
    """40 steps on one sentence are enough for the model to say it of any picture."""
    scenes(6, LABEL)
    many = ["--steps", "40", "--lr", "3e-3", "--warmup", "0", "--log-every", "40", "--validation", "2"]
    code, out, err = train("--data", "mine", *QUICK, *many)
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == "mine: 4 examples, each shown 40.0 times; 2 held out"
    assert [line.split("  ")[0] for line in lines[1:]] == ["step 0/40"] * 3 + ["step 40/40"] * 4
    before, now = (float(line.split()[-1]) for line in lines if "validation loss" in line)
    assert now < before / 10 and sum(f"says: {LABEL}" in line for line in lines) == 2
    metrics = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1] == {"step": 40, "captions": [LABEL] * 2}
    assert Path("out/report.png").read_bytes().startswith(b"\x89PNG")
    fresh = draw(random_scene(random.Random(99)), 120, 90)
    assert Captioner.from_pretrained("out", "cpu", "float32").caption(fresh) == LABEL
    assert Captioner.from_pretrained("out/checkpoints/step-40", "cpu", "float32").caption(fresh) == LABEL
    code, _, err = train("--data", "mine", *QUICK, *many)
    assert code == 0 and "resumed out at step 40" in err


def test_a_plan_is_told_and_nothing_is_written(train):
    scenes(4)
    code, out, err = train("--data", "mine", "--plan", "--batch-size", "2", "--workers", "0")
    assert (code, out) == (0, "") and "parameters" in err and "MiB at most" in err
    assert {path.name for path in Path().iterdir()} == {"mine"}


def test_adapters_alone_learn_and_the_result_is_a_plain_model(train):
    """With packed rows, too, and a part frozen."""
    scenes(6, LABEL)
    steps, parts = ["--steps", "40", "--lr", "1e-2", "--warmup", "0"], ["--lora-rank", "8", "--vision-rate", "0"]
    assert train("--data", "mine", *QUICK, *steps, *parts, "--pack", "512")[0] == 0
    ours, theirs = load_file("out/model.safetensors"), load_file(EMBEDDED / "model.safetensors")
    assert ours.keys() == theirs.keys()
    to_device = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert to_device and all(not name.startswith("vision_encoder") for name in to_device)
    fresh = draw(random_scene(random.Random(99)), 120, 90)
    assert Captioner.from_pretrained("out", "cpu", "float32").caption(fresh) == LABEL


def test_a_held_out_question_without_room_for_an_answer_stops_nothing(train):
    scenes(4, LABEL)
    code, _, err = train("--data", "mine", *QUICK, "--validation", "1", "--prompt", "é" * 478)
    assert code == 0 and "exceed lm_max_position_embeddings=1024" in err and Path("out/model.safetensors").exists()


def test_training_that_was_cut_goes_on_to_the_same_weights(train, monkeypatch):
    scenes(5)
    data = ["--data", "mine@0.5", "scenes@0.5", *QUICK, "--save-every", "1"]
    assert train(*data)[0] == 0
    whole = load_file("out/model.safetensors")
    Path("out").rename("whole")
    made = Batches.__call__

    def cut(step):
        if step == 2:
            raise OSError("the cable was cut")

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "__call__", lambda batches, step: cut(step) or made(batches, step))
        code, _, err = train(*data)
    assert code == 1 and "training stopped: the cable" in err and not Path("out/model.safetensors").exists()
    code, _, err = train(*data)
    assert code == 0 and "resumed out at step 2" in err
    again = load_file("out/model.safetensors")
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_run_that_goes_on_says_that_its_data_changed_and_not_that_it_was_copied(train):
    scenes(4)
    flags, told = ["--data", "mine@0.5", "scenes@0.5", *QUICK], r"mine@0\.5 \(4, (\w{8})\); scenes@0\.5"
    train(*flags)
    os.utime("mine/3.txt", (1, 1))
    assert "has changed" not in train(*flags)[2]
    picture, caption, digests = Path("mine/4.png"), Path("mine/4.txt"), set()
    for change in (
        lambda: (Path("mine/3.png").rename(picture), Path("mine/3.txt").rename(caption)),
        lambda: caption.write_text(caption.read_text().strip()[::-1]),
        lambda: picture.write_bytes(picture.read_bytes() + b"\0"),
    ):
        change()
        digests |= {*re.search(rf"the data has changed: it is {told} instead of {told}; ", train(*flags)[2]).groups()}
    assert len(digests) == 1 + 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_written_in_the_dtype_that_they_were_read_in(train, dtype):
    scenes(4)
    begun = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    save_checkpoint("begun", begun.model, begun.tokenizer.to_json(), dtype)
    assert train("--data", "mine", *QUICK, "--model", "begun")[0] == 0
    written, kept = load_file("out/model.safetensors"), load_file("out/checkpoints/step-3/model.safetensors")
    weights = written.keys() - {"decoder.rotary_embd.inv_freq"}
    assert {written[name].dtype for name in weights} == {dtype} == {checkpoint_dtype("begun")}
    assert {kept[name].dtype for name in weights} == {torch.float32}, "what goes on needs every bit"
    assert all(torch.equal(written[name], kept[name].to(dtype)) for name in weights)


def test_the_usual_rate_is_one_for_the_way_of_learning_and_the_width_of_the_model(train, monkeypatch):
    scenes(2)
    begun = Captioner.from_pretrained(EMBEDDED, "cpu")
    cfg = replace(begun.model.cfg, lm_hidden_dim=384, lm_n_blocks=1)
    wide = VisionLanguageModel(cfg, begun.tokenizer.image_token_id)
    save_checkpoint("wide", wide, begun.tokenizer.to_json())
    rates = []
    monkeypatch.setattr("nanovlm.training.finetuning.train", lambda *args, **looks: rates.append(args[3].lr))
    lora, given = ["--lora-rank", "4"], ["--lr", "0.5"]
    for flags in ([], lora, ["--model", "wide"], [*lora, "--model", "wide"], [*given, "--model", "wide"]):
        assert train("--data", "mine", *QUICK, *flags)[0] == 0
    assert rates == pytest.approx([FINETUNING.lr, ADAPTERS.lr, FINETUNING.lr / 2, ADAPTERS.lr / 2, 0.5])


def test_held_out_examples_are_packed_as_those_learned_and_their_loss_is_the_same(train, monkeypatch):
    scenes(8)
    looked, shapes = [], []
    made = Batches.__call__

    def shape(batches, step):
        batch = made(batches, step)
        shapes.append(tuple(batch["input_ids"].shape))
        return batch

    monkeypatch.setattr(Batches, "__call__", shape)
    for out, pack in (("padded", 0), ("packed", 512)):
        assert (
            train("--data", "mine", *QUICK, "--out", out, "--pack", pack, "--validation", "4", "--dtype", "float32")[0]
            == 0
        )
        first = json.loads(Path(out, "metrics.jsonl").read_text().splitlines()[0])
        looked.append((shapes[0], first["validation_loss"]))
        shapes.clear()
    (padded, loss), (packed, same) = looked
    assert padded[0] == 4 and packed[0] == 1, "four captions fit into one row of 512"
    assert same == pytest.approx(loss, rel=1e-4)


def test_what_is_checked_is_counted_and_shown_as_it_is_learned(train):
    scenes(4)
    Path("mine/1.png").write_bytes(b"hello")
    Path("mine/2.txt").write_text(" \n")
    chat = [{"from": "human", "value": "<image>Who?"}, {"from": "gpt", "value": "Me."}]
    chat += [{"from": "human", "value": "Why <|im_end|>?"}, {"from": "gpt", "value": "So."}]
    Path("chat.json").write_text(json.dumps([{"image": "mine/0.png", "conversations": chat}]))
    code, out, err = train("--data", "mine", "chat.json", "--check-data", "--prompt", "Tell!")
    assert code == 1 and err == ""
    lines = out.splitlines()
    processor = Captioner.from_pretrained(EMBEDDED, "cpu").processor
    rows = [
        encode(Example([f"mine/{i}.png"], [("Tell!", caption(random_scene(random.Random(i))))]), processor)
        for i in (0, 3)
    ]
    count = sum(target >= 0 for row in rows for target in row.targets)
    longest = max(len(row.ids) for row in rows)
    assert lines[0] == f"mine: 2 examples, 2 images, {count} answer tokens; the longest takes {longest} of 1024"
    assert lines[1].startswith("chat.json: 1 examples, 1 images, ")
    assert lines[3] == "2 cannot be used:"
    assert lines[4] == "  mine/1.png: not a picture that Pillow can read, or a damaged one"
    assert lines[5] == "  mine/2.png has an empty answer to 'Tell!'"
    place = "(image 1: 1 tile of 96 x 96)\n<|im_start|>user\n<|global_image|><|image|> x 36 "
    first = f"{place}Tell!<|im_end|>\n<|im_start|>assistant\n[[{caption(random_scene(random.Random(0)))}<|im_end|>]]\n"
    assert f"--- mine/0.png\n{first}" in out
    chain = f"{place}Who?<|im_end|>\n<|im_start|>assistant\n[[Me.<|im_end|>]]\n<|im_start|>user\nWhy <|im_end|>?"
    assert f"--- chat.json[0]\n{chain}<|im_end|>\n<|im_start|>assistant\n[[So.<|im_end|>]]\n" in out
    assert out.count("\n--- ") == 3
    assert not Path("out").exists()
    code, out, _ = train("--data", "mine", "--check-data", "--on-bad-example", "skip", "--validation", "0.5")
    assert code == 0 and "2 cannot be used and will be skipped:" in out and "mine, held out: " in out


def test_branches_are_shown_one_after_another(train):
    scenes(1)
    Path("mine/0.txt").unlink()
    Path("mine/metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "captions": ["One.", "Two."]}))
    code, out, _ = train("--data", "mine", "--check-data", "--prompt", "?")
    asked = "?<|im_end|>\n<|im_start|>assistant\n"
    assert code == 0 and f"<|image|> x 36 {asked}[[One.<|im_end|>]]\n... {asked}[[Two.<|im_end|>]]\n" in out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_stops_with_its_name_and_the_way_out(train, workers):
    scenes(4)
    Path("mine/2.png").write_bytes(Path("mine/2.png").read_bytes()[:200])
    code, out, err = train("--data", "mine", *QUICK, "--workers", workers)
    assert (code, out) == (1, "") and len(err.splitlines()) == 2
    assert err.splitlines()[1].startswith("training stopped: mine/2.png: ")
    assert "--on-bad-example skip" in err and "--check-data" in err
    code, _, err = train("--data", "mine", *QUICK, "--workers", workers, "--on-bad-example", "skip")
    assert code == 0 and Path("out/model.safetensors").exists()
    assert workers or "skipped: mine/2.png: " in err  # a worker has a standard error of its own


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--recipe scenes --out out --prompt x", ["--prompt", "belongs to --data"]),
        ("--recipe scenes --out out --check-data", ["--check-data", "belongs to --data"]),
        ("--recipe scenes --data mine --out out", ["not allowed with"]),
        ("--data mine", ["--out is required"]),
        ("--data mine --out out --validation 1.5", ["--validation 1.5"]),
        ("--data mine --out out --validation -1", ["--validation -1"]),
        ("--data mine --out out --validation nan", ["--validation nan"]),
        ("--data mine --out out --validation 4", ["4 of 4 examples", "none to learn from"]),
        ("--data mine --out out --min-rating 3", ["--min-rating 3", "formatting=3"]),
        ("--data mine --out out --min-rating formatting=3", ["--min-rating means nothing for mine"]),
        ("--data mine --out out --stream", ["--stream means nothing for mine"]),
        ("--data mine --out out --images mine", ["--images means nothing for mine"]),
        ("--data mine --out out --text-column x", ["--text-column means nothing for mine"]),
        ("--data mine@x --out out", ["mine@x", "'x' is no share"]),
        ("--data mine@0 --out out", ["share must be above 0"]),
        ("--data mine scenes@1 --out out", ["leave nothing for mine"]),
        ("--data mine scenes --out out", ["scenes has no size", "scenes@0.3"]),
        ("--data nowhere --out out", ["nowhere: no such file"]),
        ("--data mine --out out --model nowhere", ["nowhere", "neither a folder nor a Hub id"]),
        ("--data mine --out out --steps 0", ["steps"]),
        ("--data mine --out out --on-bad-example x", ["--on-bad-example"]),
        ("--data mine --out out --lora-alpha 8", ["--lora-alpha means nothing without --lora-rank"]),
        ("--data mine --out out --no-lora-words", ["--lora-words means nothing without --lora-rank"]),
        ("--data mine --out out --decay 0.5 --schedule cosine", ["--decay means nothing with --schedule cosine"]),
        ("--data mine --out out --validate-every 5", ["--validate-every means nothing without --validation"]),
        ("--data mine --out out --fsdp", ["--fsdp means nothing for one process, without torchrun"]),
        ("--recipe scenes --out out --lora-rank 4", ["--lora-rank means nothing with --recipe"]),
        ("--data mine --out out --check-data --plan", ["--check-data and --plan"]),
        ("--data mine --out mine/0.png", ["--out mine/0.png is a file"]),
        ("--data scenes@0.5 mine/../mine@0.5 --out mine", ["--out mine holds the data"]),
        ("--data mine --out out --model mine --revision v1", ["mine is a folder", "no revision 'v1'"]),
    ],
)
def test_wrong_use_is_one_line_before_any_work(train, flags, words):
    scenes(4)
    refused(train(*flags.split()), *words, program="train.py")
    assert not Path("out").exists()


def test_a_model_that_no_run_can_go_on_from_is_not_overwritten(train):
    scenes(2)
    shutil.copytree(EMBEDDED, "begun")
    refused(
        train("--data", "mine", *QUICK, "--model", "begun", "--out", "begun"), "begun holds a model", program="train.py"
    )
    assert Path("begun/model.safetensors").read_bytes() == Path(EMBEDDED, "model.safetensors").read_bytes()


def test_without_tensorboard_its_flag_names_its_extra(train, monkeypatch):
    scenes(2)
    monkeypatch.setattr("nanovlm.training.finetuning.find_spec", lambda name: None)
    refused(train("--data", "mine", *QUICK, "--tensorboard"), "nanovlm[tensorboard]", program="train.py")


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(train):
    scenes(2)
    code, out, err = train("--data", "mine", *QUICK, "--out", "mine/0.png/out")
    told = r"training stopped: mine/0\.png/out cannot be written: .*; mend that and run again to go on from the start"
    assert (code, out) == (1, "") and re.fullmatch(told, err.splitlines()[-1])
    Path("out/metrics.jsonl").mkdir(parents=True)  # a folder where a file should go
    code, _, err = train("--data", "mine", *QUICK)
    assert code == 1 and "out cannot be written" in err and not Path("out/checkpoints").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_too_little_memory_is_a_line_with_the_way_out(train, monkeypatch, error):
    scenes(2)

    def raises(*args, **kwargs):
        raise error

    monkeypatch.setattr("nanovlm.training.loop.backward", raises)
    code, out, err = train("--data", "mine", *QUICK)
    assert (code, out) == (1, "") and len(err.splitlines()) == 2
    assert err.splitlines()[1].startswith("training stopped: not enough memory; lower --batch-size")


def test_another_error_of_torch_is_a_bug_and_shows_where(train, monkeypatch):
    scenes(2)
    monkeypatch.setattr("nanovlm.training.loop.backward", lambda *args: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        train("--data", "mine", *QUICK)


def test_a_killed_process_of_batches_is_a_line_with_the_way_out(train, monkeypatch):
    scenes(2)
    here = os.getpid()
    made = Batches.__call__

    def killed(batches, step):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(batches, step)

    monkeypatch.setattr(Batches, "__call__", killed)
    code, out, err = train("--data", "mine", *QUICK, "--workers", "1")
    assert (code, out) == (1, "") and len(err.splitlines()) == 2
    assert "training stopped: DataLoader worker" in err and "--workers 0" in err


def test_help_tells_both_defaults(train):
    _, out, _ = train("--help")
    assert f"({FINETUNING.steps}; scenes: {SCENES.steps})" in " ".join(out.split())


def test_what_has_no_end_is_checked_in_part(train):
    code, out, err = train("--data", "scenes", "--check-data")
    assert code == 0 and out.startswith("scenes: the first 1,000 examples, 1,000 images, ")
    assert err == "scenes: 1,000 examples read\n"
