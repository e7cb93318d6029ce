"""A run that is killed goes on as if nothing had happened, and what it leaves behind is a model at every step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from models.config import extra_tokens
from models.vision_language_model import VisionLanguageModel
from nanovlm import Captioner
from nanovlm.data.examples import Example, collate, encode
from nanovlm.errors import CheckpointError, TrainingError
from nanovlm.processor import Processor
from nanovlm.synthetic.recipe import batches as scenes_of
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import train

COLOURS = ("red", "green", "blue", "black")
CFG = TrainConfig(steps=6, batch_size=2, lr=3e-3, warmup=2, save_every=3, log_every=2, workers=0)


@pytest.fixture(scope="module")
def processor(speaker, tiny_config):
    """For a model of one tile whose dropout draws numbers at every step."""
    tokenizer = speaker[1].tokenizer
    cfg = tiny_config(
        max_img_size=16,
        vlm_extra_tokens=extra_tokens(0),
        lm_vocab_size=len(tokenizer),
        lm_max_position_embeddings=256,
        lm_dropout=0.1,
        vit_dropout=0.1,
    )
    return Processor(cfg, tokenizer)


@pytest.fixture(scope="module")
def batch(processor):
    """A pure function of the step: two plain pictures and their colours."""

    def batch(step):
        some = [COLOURS[(step + i) % 4] for i in range(2)]
        examples = [Example([Image.new("RGB", (16, 16), colour)], [("What colour?", colour)]) for colour in some]
        return collate([encode(example, processor) for example in examples])

    return batch


@pytest.fixture(scope="module")
def learn(processor, batch):
    """Train a model of this seed into a folder; what was logged."""

    def learn(folder, cfg=CFG, batch=batch, seed=0, shape=processor.cfg, **options):
        lines = []
        torch.manual_seed(seed)
        model = VisionLanguageModel(shape, processor.tokenizer.image_token_id)
        train(model, processor.tokenizer.to_json(), batch, cfg, folder, log=lines.append, **options)
        return lines

    return learn


def drop(entry, *names):
    return {name: value for name, value in entry.items() if name not in names}


def files(folder):
    """What is in a folder: texts and, bit for bit, tensors (the order of a header's metadata is left to chance)."""
    found = {}
    for path in folder.rglob("*.*"):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = {key: (t.dtype, t.shape, t.numpy().tobytes()) for key, t in load_file(path).items()}
        elif path.name == "metrics.jsonl":  # the clock and the memory differ from run to run
            found[name] = [drop(json.loads(line), "tokens_per_s", "memory") for line in path.read_text().splitlines()]
        elif path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def whole(learn, tmp_path_factory):
    """A run of six steps that nobody disturbed."""
    learn(folder := tmp_path_factory.mktemp("whole") / "run")
    return files(folder)


def killed_at(step, batch, error=KeyboardInterrupt):
    def until(i):
        if i == step:
            raise error
        return batch(i)

    return until


def poisoned_at(step, batch):
    return lambda i: batch(i) | {"images": batch(i)["images"] * (math.nan if i == step else 1)}


# --------------------------------------------------------------------------------------------------- the plan


def test_the_rate_rises_stays_and_falls_to_0():
    cfg = TrainConfig(steps=100, lr=2.0, warmup=9, decay=0.4)
    rates = [cfg.lr_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[9:61] == [2.0] * 52
    assert rates[60:] == pytest.approx([2.0 * (100 - step) / 40 for step in range(60, 101)])
    assert rates[99] > rates[100] == 0


def test_a_rate_may_neither_rise_nor_fall():
    assert {TrainConfig(steps=5, lr=2.0, warmup=0, decay=0).lr_at(step) for step in range(5)} == {2.0}
    falling = TrainConfig(steps=4, lr=1.0, warmup=0, decay=1)
    assert [falling.lr_at(step) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"batch_size": 0}, {"save_every": 0}, {"log_every": 0}, {"workers": -1}, {"warmup": -1},
        {"lr": -1e-3}, {"lr": 0.0}, {"lr": math.nan}, {"lr": math.inf}, {"decay": 1.01}, {"decay": -0.1},
        {"weight_decay": -1}, {"max_grad_norm": math.nan}, {"max_grad_norm": 0.0}, {"lora_alpha": 0.0},
        {"beta2": 1.0}, {"seed": -1}, {"seed": 2**70},
    ],
    ids=str,
)  # fmt: skip
def test_a_number_out_of_range_is_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}".replace("+", r"\+")):
        TrainConfig(**wrong)


# ----------------------------------------------------------------------------------------------- going on


def test_a_killed_run_goes_on_as_if_nothing_had_happened(learn, batch, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "run", batch=killed_at(4, batch))
    assert (tmp_path / "run/checkpoints/step-3").is_dir()
    learn(tmp_path / "another", replace(CFG, lr=1e-2), seed=7)  # leaves torch's generator elsewhere
    lines = learn(tmp_path / "run", seed=8)  # other first weights: those of the checkpoint count
    assert lines[0] == f"resumed {tmp_path / 'run'} at step 3"
    assert files(tmp_path / "run") == whole
    assert files(tmp_path / "another")["model.safetensors"] != whole["model.safetensors"]


def test_the_same_run_twice_is_the_same(learn, whole, tmp_path):
    learn(tmp_path / "run")
    assert files(tmp_path / "run") == whole


def test_a_finished_run_has_nothing_left_to_do(learn, batch, whole, tmp_path):
    learn(tmp_path)
    learn(tmp_path, batch=killed_at(0, batch))
    assert files(tmp_path) == whole


def test_only_the_newest_checkpoint_stays(whole):
    assert {path.rpartition("/")[0] for path in whole} == {"", "checkpoints/step-6"}


def test_the_final_model_is_the_last_checkpoint(whole):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert whole[name] == whole[f"checkpoints/step-6/{name}"]


def test_every_checkpoint_is_a_model(learn, batch, tmp_path):
    said = []

    def looking(step):
        for folder in tmp_path.glob("run/checkpoints/*"):
            captioner = Captioner.from_pretrained(folder, dtype="float32")
            said.append((folder.name, captioner.caption(Image.new("RGB", (9, 9)), max_new_tokens=2)))
        return batch(step)

    learn(tmp_path / "run", replace(CFG, save_every=2), batch=looking)
    assert [name for name, _ in said] == ["step-2", "step-2", "step-4", "step-4"]


def test_files_hold_numbers_and_text_only(whole):
    assert {name.rpartition(".")[2] for name in whole} == {"json", "jsonl", "safetensors"}  # nothing that could run
    for name, content in whole.items():
        assert json.loads(content) if name.endswith("json") else content
    state = json.loads(whole["checkpoints/step-6/training.json"])
    assert state["step"] == 6 and state["config"].pop("data") is None and TrainConfig(**state["config"]) == CFG


def test_weights_are_stored_in_the_precision_asked_for(learn, whole, tmp_path):
    learn(tmp_path / "run", stored_as=torch.float16)
    stored = load_file(tmp_path / "run/model.safetensors")
    trained = load_file(tmp_path / "run/checkpoints/step-6/model.safetensors")
    for name, tensor in trained.items():
        if name.endswith("inv_freq"):
            assert torch.equal(stored[name], tensor)
        else:
            assert stored[name].dtype == torch.float16 and torch.equal(stored[name], tensor.half())


# ------------------------------------------------------------------------------------------------- learning


def test_it_learns(learn, processor, tmp_path):
    cfg = TrainConfig(steps=120, lr=1e-2, warmup=5, save_every=1000, log_every=10, workers=0)
    shape = replace(processor.cfg, lm_dropout=0.0, vit_dropout=0.0)
    pictures = [Image.new("RGB", (16, 16), colour) for colour in COLOURS]
    rows = [encode(Example([p], [("What colour?", c)]), processor) for p, c in zip(pictures, COLOURS)]
    lines = learn(tmp_path / "run", cfg, lambda step: collate(rows), shape=shape)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[0] > 1 > 10 * losses[-1]
    captioner = Captioner.from_pretrained(tmp_path / "run", dtype="float32")
    assert list(captioner.captions(pictures, "What colour?", max_new_tokens=8)) == list(COLOURS)


def test_progress_is_a_line_now_and_then(learn, tmp_path):
    lines = learn(tmp_path / "run", replace(CFG, steps=5))
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    assert all("\n" not in line and "loss" in line and "min left" in line for line in lines)


def test_a_process_that_prepares_batches_changes_nothing(learn, processor, tmp_path):
    for workers in (0, 1):
        learn(tmp_path / str(workers), replace(CFG, workers=workers), scenes_of(processor, batch_size=CFG.batch_size, seed=CFG.seed))
    assert files(tmp_path / "0")["model.safetensors"] == files(tmp_path / "1")["model.safetensors"]


# ----------------------------------------------------------------------------------------------- going wrong


def test_a_loss_that_is_no_number_stops_before_it_spoils_anything(learn, batch, whole, tmp_path):
    with pytest.raises(TrainingError, match="step 4 has loss nan.*lower lr=0.003.*last checkpoint") as caught:
        learn(tmp_path / "run", batch=poisoned_at(4, batch))
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in (tmp_path / "run").rglob("step-*")] == ["step-3"]
    learn(tmp_path / "run")
    assert files(tmp_path / "run") == whole


def test_a_save_that_is_killed_leaves_the_last_one(learn, whole, tmp_path, monkeypatch):
    from nanovlm.training import checkpointing as resuming

    writes = []

    def dies(tensors, path):
        writes.append(path)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        safe_save(tensors, path)

    safe_save = resuming.save_file
    monkeypatch.setattr(resuming, "save_file", dies)
    with pytest.raises(TrainingError, match="No space left.*make room.*go on from .*step-3") as caught:
        learn(tmp_path / "run")
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-3"]
    monkeypatch.undo()
    learn(tmp_path / "run")
    assert files(tmp_path / "run") == whole


@pytest.mark.parametrize("change", [{"lm_n_blocks": 3}, {"lm_inter_dim": 40}, {"lm_re_base": 50.0}], ids=str)
def test_a_folder_of_another_model_is_refused_and_left_alone(learn, processor, tmp_path, change):
    learn(tmp_path / "run", replace(CFG, steps=3))
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match="step-3") as caught:
        learn(tmp_path / "run", shape=replace(processor.cfg, **change))
    ((name, value),) = change.items()
    told = str(caught.value)
    assert f"a model with {name}={getattr(processor.cfg, name)}, but this one has {name}={value}" in told
    assert len(told.splitlines()) == 1
    assert files(tmp_path / "run") == before


def test_folders_with_other_names_are_no_checkpoints(learn, whole, tmp_path):
    (tmp_path / "run/checkpoints/step-by-step").mkdir(parents=True)
    learn(tmp_path / "run")
    assert files(tmp_path / "run") == whole and (tmp_path / "run/checkpoints/step-by-step").is_dir()


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(learn, batch, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TrainingError, match="file cannot be written: .*File exists.*; mend that and run again"):
        learn(tmp_path / "file", batch=killed_at(0, batch))
