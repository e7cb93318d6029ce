"""train.py --data as a user runs it: what it learns, what it prints, and its errors for data it cannot use."""

import argparse
import json
import os
import random
import re
import shutil
import signal
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import checkpoint_dtype, save_checkpoint
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, Captioner
from nanovlm.cli import train as train_verb
from nanovlm.data import open_data
from nanovlm.errors import TrainingError
from nanovlm.options import ReadOptions
from nanovlm.synthetic import caption, draw, random_scene
from nanovlm.training import finetuning as made
from nanovlm.training.config import ADAPTERS, EPOCHS, FINETUNING, JOINED_EPOCHS, MAX_STEPS, MUON_LR, TrainConfig
from nanovlm.training.finetuning import FinetuneOptions, choose_settings, prepare, remedies
from nanovlm.training.loop import Trainer
from support.cli import assert_usage_error

pytestmark = pytest.mark.usefixtures("in_tmp_path")
QUICK = ["--max-steps", "3", "--batch-size", "4", "--num-workers", "0", "--device", "cpu", "--out", "out"]
LABEL = "A photograph of my cat."


def prepared(*argv):
    """The model, task and settings that train.py makes of its flags."""
    train_verb.add_flags(parser := argparse.ArgumentParser())
    args = parser.parse_args([str(arg) for arg in argv])
    return prepare(train_verb.options_from_args(args), train_verb.config_from_args(args))


def scenes(n, text=None):
    """n drawn scenes with their captions, or one text for all."""
    Path("mine").mkdir()
    for i in range(n):
        scene = random_scene(random.Random(i))
        draw(scene, 96, 96).save(f"mine/{i}.png")
        Path(f"mine/{i}.txt").write_text(f"{text or caption(scene)}\n")


def tar():
    pytest.importorskip("datasets")
    with tarfile.open("mine.tar", "w") as file:
        file.add("mine", "")
    return ["--data", "mine.tar", "--stream"]


def test_each_held_out_example_of_a_stream_is_asked_once_and_counts_once_in_the_loss():
    scenes(12)
    model, task, _ = prepared(*tar(), "--validation", 0.5, "--out", "out")
    names = [answer.question.name for answer in task.answer_questions(model, True).answers]
    assert 1 < len(names) == len(set(names)) < 12
    assert sum(len(task.validation(i)["input_ids"]) for i in range(task.n_validation)) == len(names)


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_goes_on_where_it_stood(train, workers):
    scenes(40)
    flags = [*tar(), *QUICK, "--save-every", "2", "--max-steps", "4", "--num-workers", workers]
    assert train(*flags)[0] == 0
    whole = Path("out/model.safetensors").read_bytes()
    shutil.rmtree("out/checkpoints/step-4")
    assert "resumed out at step 2" in train(*flags)[2]
    assert Path("out/model.safetensors").read_bytes() == whole
    assert json.loads(Path("out/checkpoints/step-2/trainer.json").read_text())["streams"]


HELD_OUT = {  # flags of a run, and the end of its line of data
    "": "90 examples, each shown 0.0 times; 10 held out (--validation N holds out N, 0 none)\n",
    "--validation 7": "93 examples, each shown 0.0 times; 7 held out\n",
    "--validation 0": "100 examples, each shown 0.0 times\n",
}


@pytest.mark.full
@pytest.mark.parametrize("flags", HELD_OUT)
def test_a_resumed_run_holds_out_what_it_began_with(train, flags):
    scenes(100)
    data = ["--data", "mine", *QUICK, "--max-steps", "1"]
    code, _, err = train(*data, *flags.split())
    assert code == 0 and err.startswith("mine: 100 examples, 100 different images\n") and HELD_OUT[flags] in err, err
    n = int(flags.partition(" ")[2] or 10)
    if n == 0:
        assert_usage_error(train(*data, "--metric", "anls"), "no effect", program="train.py")
        return
    model, task, cfg = prepared(*data)
    assert task.n_held_out == n and cfg.interval == 1
    assert n == len(task.answer_questions(model, True).answers)
    assert sum(len(task.validation(i)["input_ids"]) for i in range(task.n_validation)) == n, "all, each once"


def test_every_run_writes_the_file_that_repeats_it(train):
    """And names its folders in full, so that it may be run from elsewhere."""
    scenes(5)
    other_model("other")
    Path("table.csv").write_text("image,text\n" + "".join(f"{i}.png,word {i}\n" for i in range(5)))
    places = {name: os.path.abspath(name) for name in ("table.csv", "mine", "other")}
    flags = "--data table.csv@0.5 scenes@0.5 --images mine --model other --lr 3e-4 --validation 1"
    flags += " --save-every 9 --metric anls --lora-rank 2 --batch-size 2"
    assert train(*QUICK, *flags.split(), "--prompt", "What: 'ü'?")[0] == 0
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    code, _, err = train("--config", "../out/run.json", "--out", "again")
    assert code == 0, err
    first, again = (json.loads(Path(out, "run.json").read_text()) for out in ("../out", "again"))
    assert again == first | {"out": "again"} and first["max_steps"] == 3 and first["optimizer"] == "adamw"
    assert first["data"] == [f"{places['table.csv']}@0.5", "scenes@0.5"]
    assert (first["images"], first["model"]) == (places["mine"], places["other"])
    assert Path("again/model.safetensors").read_bytes() == Path("../out/model.safetensors").read_bytes()
    os.chdir("..")
    code, _, err = train("--config", "out/run.json", "--out", "third", "--max-steps", "1", "--data", "table.csv")
    assert code == 0 and "step 1/1" in err and "scenes" not in err
    assert train("--data", "mine", *QUICK[2:6], "--out", "epochs", "--epochs", "0.5")[0] == 0
    shorter = json.loads(Path("epochs/run.json").read_text())
    assert shorter["epochs"] == 0.5 and "max_steps" not in shorter and shorter["optimizer"] == "muon"
    refused = train("--config", "out/run.json", "--epochs", "1")
    assert_usage_error(refused, "--epochs and --max-steps exclude", "out/run.json", program="train.py")


CHOSEN = {  # flags -> settings that follow
    "": {"max_steps": 850, "optimizer": "muon", "lr": MUON_LR},  # the embedded model's run.json says muon
    "--lora-rank 4": {"optimizer": "adamw", "lr": ADAPTERS.lr},
    "--model wide": {"optimizer": "adamw", "lr": FINETUNING.lr / 2},
    "--model wide --lora-rank 4": {"lr": ADAPTERS.lr / 2},
    "--model wide --lr 0.5": {"lr": 0.5},
    "--model wide/tagged": {"optimizer": "muon", "lr": MUON_LR / 2},  # by its run.json
    "--epochs 2": {"max_steps": 9},
    "--epochs 0.3": {"max_steps": 2},
    "--epochs 2 --gradient-accumulation-steps 4": {"max_steps": 3},
    "--epochs 1 --data scenes@0.5": {"max_steps": 9},  # until all of mine have been shown
}


@pytest.mark.parametrize("flags", CHOSEN)
def test_settings_follow_from_model_and_data(wide, flags):
    scenes(9)
    os.symlink(wide, "wide")
    share = "mine@0.5" if "scenes" in flags else "mine"
    _, _, cfg = prepared("--data", share, "--batch-size", "2", "--out", "out", *flags.split())
    assert {name: getattr(cfg, name) for name in CHOSEN[flags]} == pytest.approx(CHOSEN[flags])


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a model twice as wide as the embedded one, and in it one that says that it was trained by Muon."""
    folder = tmp_path_factory.mktemp("wide")
    captioner = Captioner.from_pretrained(EMBEDDED, "cpu")
    cfg = replace(captioner.model.cfg, lm_hidden_dim=384, lm_n_blocks=1)
    model = VisionLanguageModel(cfg, captioner.tokenizer.image_token_id)
    for path in (folder, folder / "tagged"):
        save_checkpoint(path, model, captioner.tokenizer.to_json())
    (folder / "tagged/run.json").write_text('{"optimizer": "muon"}')
    return folder


BACKBONES = {"backbones": ("v", "l")}


@pytest.mark.parametrize(("backbones", "epochs"), [({}, EPOCHS), (BACKBONES, JOINED_EPOCHS)])
def test_the_default_number_of_steps_follows_from_that_of_the_examples(backbones, epochs):
    options, expected = FinetuneOptions(automatic=["max_steps"], **backbones), min(epochs * 250, MAX_STEPS)
    for n, steps in ((0, 850), (8, 850), (400, max(850, epochs * 50)), (2000, expected), (10**6, MAX_STEPS)):
        assert choose_settings(options, FINETUNING, 192, n / 8)[0].max_steps == steps


def test_a_new_projector_leaves_the_encoder_frozen():
    automatic = {"automatic": ["freeze"]}
    for options, rank in ((BACKBONES | automatic, 4), (BACKBONES | automatic, 0), (automatic, 4), (BACKBONES, 4)):
        cfg = TrainConfig(lora_rank=rank, freeze=["language"])
        cfg, reasons = choose_settings(FinetuneOptions(**options), cfg, 192, 10)
        is_chosen = options.keys() == {"backbones", "automatic"}
        assert cfg.freeze == (("vision",) if is_chosen else ("language",))
        assert any("vision frozen" in reason for reason in reasons) == is_chosen


def test_the_best_joined_model_is_that_of_the_lowest_loss_by_default():
    scenes(2)
    _, held_out = open_data(["mine"], ReadOptions(), "1")
    processor = Captioner.from_pretrained(EMBEDDED, "cpu").processor
    for options, metric in (
        ({}, "f1"),
        (BACKBONES, "loss"),
        (BACKBONES | {"metric": "f1"}, "f1"),
        ({"metric": "-anls"}, "anls"),
    ):
        task = made.held_out_task(FinetuneOptions(**options), TrainConfig(), held_out, processor)
        assert (task["metric"], task["is_error_rate"]) == (metric, metric == "anls")


@pytest.mark.full
def test_adapters_learn_and_the_result_is_a_plain_model(train):
    scenes(6, LABEL)
    flags = ["--max-steps", "40", "--batch-size", "2", "--lr", "1e-2", "--pack", "256"]
    flags += ["--lora-rank", "8", "--freeze", "vision", "--config", "run.json"]
    Path("run.json").write_text('{"warmup_steps": 0}')
    assert train("--data", "mine", *QUICK, *flags)[0] == 0
    ours, theirs = load_file("out/model.safetensors"), load_file(EMBEDDED / "model.safetensors")
    assert ours.keys() == theirs.keys()
    changed = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert changed and all(name.endswith("weight") and not name.startswith("vision_encoder") for name in changed)
    fresh = draw(random_scene(random.Random(99)), 120, 90)
    assert Captioner.from_pretrained("out", "cpu", "float32").caption(fresh) == LABEL


def other_model(folder, scale=1.01):
    shutil.copytree(EMBEDDED, folder)
    path = Path(folder, "model.safetensors")
    save_file({name: tensor * scale for name, tensor in load_file(path).items()}, path)
    return folder


RESUMED = [  # flags of a run, of the one that resumes it, parts of its lines, and what run.json then names
    ("", "", "", {}),
    ("", "--model other", "the model has changed: it is {other}|instead of the embedded model (", {}),
    ("--model other", "", "it is the embedded model (|instead of {other} (", {"model": "other"}),
    ("--model other", "--model copy", "", {"model": "copy"}),
    ("--model other", "--model third", "it is {third}|instead of {other}", {"model": "other"}),
    ("--prompt A?", "--prompt B?", "the prompt has changed: it is 'B?' instead of 'A?'; training", {"prompt": "B?"}),
    ("", "--weight-decay 0.3", "weight_decay=0.3 instead of 0.1", {"weight_decay": 0.3}),
    ("--validation 2", "--validation 3", "validation=3 instead of 2", {"validation": 3}),
    ("--validation 2", "", "", {"validation": 2}),
    ("--validation 2 --metric anls", "--metric f1", "metric=f1 instead of anls", {"validation": 2, "metric": "f1"}),
]


@pytest.mark.full
@pytest.mark.parametrize(("first", "then", "lines", "named"), RESUMED)
def test_a_resumed_run_says_what_changed_and_its_file_names_what_was_trained(train, first, then, lines, named):
    scenes(6)
    other_model("other")
    shutil.copytree("other", "copy")
    other_model("third", 1.02)
    data = ["--data", "mine", *QUICK]
    assert train(*data, *first.split())[0] == 0
    places = {name: os.path.abspath(name) for name in ("other", "third", "copy")}
    named = {name: places.get(value, value) for name, value in named.items()}
    for steps in ("5", "6"):
        code, _, err = train(*data, *then.split(), "--max-steps", steps)
        assert code == 0, err
        if steps == "5" or "model" in lines:
            assert all(line in err for line in lines.format(**places).split("|")), err
        assert lines or "has changed" not in err
        content = json.loads(Path("out/run.json").read_text())
        assert {name: content.get(name) for name in named} == named and ("model" in content) == ("model" in named)
    assert train(*data, *then.split(), "--seed", "9", "--max-steps", "6")[0] == 0
    assert json.loads(Path("out/run.json").read_text()) == content, "nothing was trained"


@pytest.mark.full
def test_adapters_of_another_model_are_refused(train):
    scenes(6)
    shutil.copytree(other_model("other"), "copy")
    flags = ["--data", "mine", *QUICK, "--lora-rank", "2", "--freeze", "vision"]
    assert train(*flags, "--model", "other")[0] == train(*flags, "--model", "copy", "--max-steps", "4")[0] == 0
    path = Path("copy/model.safetensors")
    weights = load_file(path)
    save_file({name: t * 1.1 if name.startswith("vision") else t for name, t in weights.items()}, path)
    code, _, err = train(*flags, "--model", "copy", "--max-steps", "5")
    assert code == 2 and "holds adapters of a model with another vision_encoder" in err, err


def test_data_are_known_by_their_contents_and_the_model_by_its_place():
    def known(*data):
        return made.fingerprint(open_data(data or ["mine@0.5", "scenes@0.5"], ReadOptions(), 0)[0])

    scenes(4)
    kinds = (str, Path, os.path.abspath)
    assert len({known(kind("mine")) for kind in kinds}) == 1
    assert len({made.base_model(FinetuneOptions(model=kind(EMBEDDED))) for kind in kinds}) == 1
    before = known()
    for suffix in ("png", "txt"):
        Path(f"mine/3.{suffix}").rename(f"mine/4.{suffix}")
    assert known() == before and re.fullmatch(r"mine@0\.5 \(4, \w{8}\); scenes@0\.5", before)
    for name in ("mine/4.txt", "mine/4.png"):
        Path(name).write_bytes(Path(name).read_bytes() + b".")
        assert known() != before
        before = known()


OTHER_DTYPES = [pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.float16, torch.float32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHER_DTYPES])
def test_weights_are_written_in_the_dtype_in_which_they_were_stored(train, dtype):
    """And a resumed run keeps its optimizer."""
    scenes(4)
    begun = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    save_checkpoint("begun", begun.model, begun.tokenizer.to_json(), dtype)
    assert train("--data", "mine", *QUICK, "--model", "begun")[0] == 0
    written, kept = load_file("out/model.safetensors"), load_file("out/checkpoints/step-3/model.safetensors")
    frequencies = "decoder.rotary_embd.inv_freq"
    weights = written.keys() - {frequencies}
    assert written[frequencies].dtype == torch.float32, "in which the file's readers use them"
    assert {written[name].dtype for name in weights} == {dtype} == {checkpoint_dtype("begun")}
    assert all(torch.equal(written[name], kept[name].to(dtype)) for name in weights)
    assert {kept[name].dtype for name in weights} == {torch.float32}, "what goes on needs every bit"
    assert prepared("--data", "mine", *QUICK)[2].optimizer == "adamw", "that of the run, not muon of the model"


@pytest.mark.full
def test_held_out_examples_are_packed_as_the_training_examples_and_their_loss_is_the_same():
    scenes(8)
    found = []
    for out, pack in (("padded", 0), ("packed", 512)):
        model, task, cfg = prepared("--data", "mine", *QUICK, "--out", out, "--pack", pack, "--validation", "4")
        loss = Trainer(model, task, replace(cfg, dtype="float32")).validation_loss()
        found.append((len(task.validation(0)["input_ids"]), loss))
    (rows, loss), (packed_rows, packed_loss) = found
    assert (rows, packed_rows) == (4, 1), "four captions fit into one row of 512"
    assert packed_loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_with_a_remedy(train, workers):
    """A DataLoader's worker would put a traceback into the message."""
    scenes(4)
    Path("mine/2.png").write_bytes(Path("mine/2.png").read_bytes()[:200])
    flags = ["--data", "mine", *QUICK, "--num-workers", workers]
    code, out, err = train(*flags)
    assert (code, out) == (1, "") and len(err.splitlines()) == 5
    assert err.splitlines()[-1].startswith("train.py: mine/2.png: ")
    assert "--on-error skip" in err and "--check-data" in err
    code, _, err = train(*flags, "--on-error", "skip")
    assert code == 0 and Path("out/model.safetensors").exists()
    assert workers or "skipped: mine/2.png: " in err  # a worker has a standard error of its own


def test_help_names_the_defaults_and_check_data_reads_a_part_of_an_endless_source(train, monkeypatch):
    code, out, _ = train("--help")
    assert code == 0 and all(f" {default:g}" in out for default in (MUON_LR, EPOCHS, JOINED_EPOCHS, MAX_STEPS))
    monkeypatch.setattr("nanovlm.data.check.MAX_FROM_ENDLESS", 7)
    code, out, _ = train("--data", "scenes", "--check-data")
    assert code == 0 and out.startswith("scenes: the first 7 examples, ")


OURS = "config.json run.json tokenizer.json metrics.jsonl report.html nanovlm.json adapter base"


@pytest.mark.parametrize("name", OURS.split())
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_folder_with_a_file_of_ours_by_name_is_left_alone(train, name, kind):
    scenes(2)
    Path("out/.work.tmp").mkdir(parents=True)
    for own in ("out/.thesis.tmp", "victim", "out/file"):
        Path(own).write_text("{}")
    path = Path("out", name)
    ways = {"link": lambda: path.symlink_to("../victim"), "folder": path.mkdir}
    ways.get(kind, lambda: Path("out/file").rename(path))()
    before = sorted(Path("out").rglob("*"))
    assert_usage_error(train("--data", "mine", *QUICK), name, "name another folder", program="train.py")
    assert sorted(Path("out").rglob("*")) == before and Path("victim").read_text() == "{}"
    assert kind == "folder" or path.read_text() == "{}"


@pytest.mark.parametrize("flag", ["--model", "--out"])
def test_a_broken_run_json_of_the_model_or_of_the_folder_is_named(train, flag):
    scenes(2)
    other_model("other")
    Path("other/run.json").write_text('{"optimizer": ')
    if flag == "--out":
        Path("other/model.safetensors").unlink()
    before = sorted(Path("other").iterdir())
    words = ("other/run.json cannot be read: ", "; correct or remove it, or name another folder\n")
    assert_usage_error(train("--data", "mine", *QUICK, flag, "other"), *words, program="train.py")
    assert sorted(Path("other").iterdir()) == before


def test_links_in_the_folder_of_a_run_are_replaced(train):
    scenes(2)
    Path("out/.work.tmp").mkdir(parents=True)
    data = ["--data", "mine", *QUICK, "--max-steps"]
    assert train(*data, "3")[0] == 0
    names = ("config.json", "model.safetensors", "metrics.jsonl", "run.json", "report.html")
    for name in names:
        path = Path("out", name)
        path.rename(f"victim.{name}") if path.exists() else Path(f"victim.{name}").touch()
        path.symlink_to(f"../victim.{name}")
    before = {name: Path(f"victim.{name}").read_bytes() for name in names}
    assert train(*data, "4")[0] == 0
    assert {name: Path(f"victim.{name}").read_bytes() for name in names} == before
    assert Path("out/.work.tmp").is_dir()
    Path("out/checkpoints").rename("elsewhere")
    Path("out/checkpoints").symlink_to("../elsewhere")
    code, _, err = train(*data, "5")
    assert code == 2 and "out/checkpoints is a link; remove it, or name another folder" in err


def test_a_killed_worker_is_one_line_with_a_remedy():
    scenes(2)
    model, task, cfg = prepared("--data", "mine", *QUICK, "--num-workers", "1")
    task = replace(task, get_batch=lambda number: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(TrainingError, match="DataLoader worker .*--num-workers 0") as caught, remedies():
        Trainer(model, task, cfg).run()
    assert "\n" not in str(caught.value)


ERRORS = [  # an error, and words of the one line, None if the error stays
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee"), "not enough memory; lower"),
    (RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 9 bytes."), "not enough memory"),
    (MemoryError(), "not enough memory; lower --batch-size"),
    *((error, None) for error in (RuntimeError("shapes differ"), ValueError("a bug"), TrainingError("diverged"))),
]


@pytest.mark.parametrize(("error", "message"), ERRORS, ids=str)
def test_running_out_of_memory_is_one_line_with_a_remedy_and_other_errors_stay(error, message):
    with pytest.raises(TrainingError if message else type(error), match=message) as caught, remedies():
        raise error
    assert "\n" not in str(caught.value) if message else caught.value is error


@pytest.mark.full
@pytest.mark.parametrize("metric", ["anls", "loss"])
def test_the_model_answers_its_training_prompt_and_is_the_best_by_the_metric(train, run_script, metric):
    """30 steps on one caption are enough to generate it for any image; scores are those that `evaluate` finds."""
    scenes(10, LABEL)
    flags = ["--max-steps", "30", "--batch-size", "2", "--lr", "3e-3", "--validation", "3", "--save-every", "10"]
    flags += ["--prompt", "Who?", "--metric", metric, "--config", "run.json"]
    Path("run.json").write_text('{"warmup_steps": 0}')
    code, out, err = train("--data", "mine", *QUICK, *flags)
    assert (code, out) == (0, "") and "\nmine: 7 examples, each shown 8.6 times; 3 held out\n" in err, err
    assert "chosen: muon, as the model was trained by it\n" in err
    entries = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    found = {entry["step"]: entry[f"validation_{metric}"] for entry in entries if f"validation_{metric}" in entry}
    sign = -1 if metric == "loss" else 1
    best = max((10, 20, 30), key=lambda step: (sign * found[step], step))
    assert f"out holds the model of step {best}, the best by held-out {metric} {found[best]:.4f}" in err
    assert "exact match 1.0000 (95% interval 0.438 to 1.000)" in err
    captioner = Captioner.from_pretrained("out", "cpu", "float32")
    draw(random_scene(random.Random(99)), 120, 90).save("fresh.png")
    assert captioner.prompt == "Who?" and captioner.caption("fresh.png", "Who?") == LABEL
    assert run_script("generate.py", "caption", "--model", "out", "fresh.png")[1] == f"{LABEL}\n"
    captioner.save_pretrained("copy")
    assert Captioner.from_pretrained("copy", "cpu").prompt == "Who?"
    code, out, err = run_script("nanovlm", "evaluate", "--model", "out", "--data", "mine", "--limit", "2")
    assert code == 0 and "1.000" in out and "note: out was trained on mine" in err
    assert "note" not in run_script("nanovlm", "evaluate", "--model", "out", "--data", "mine", "--validation", "3")[2]
