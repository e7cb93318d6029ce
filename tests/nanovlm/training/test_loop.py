"""Training on plain images and their colors: it learns, it is reproducible, and each checkpoint is a model."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image

from models.config import extra_tokens
from models.vision_language_model import VisionLanguageModel
from nanovlm import Captioner
from nanovlm.data.examples import Example, collate, encode
from nanovlm.errors import DataError, TrainingError
from nanovlm.evaluation import Evaluation
from nanovlm.processing.processor import Processor
from nanovlm.synthetic.recipe import SceneBatches
from nanovlm.training.config import TrainConfig
from support.logs import log_lines
from support.training import train

COLORS = ("red", "green", "blue", "black")
CFG = TrainConfig(
    max_steps=6, batch_size=2, lr=3e-3, warmup_steps=2, save_every=3, log_every=2, num_workers=0, keep_checkpoints=1
)


@pytest.fixture(scope="module")
def processor(model_and_processor, tiny_config):
    """For a model of one tile whose dropout draws numbers at every step."""
    tokenizer = model_and_processor[1].tokenizer
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
    """A pure function of the number: two plain images and their colors."""

    def batch(number):
        colors = [COLORS[(number + i) % 4] for i in range(2)]
        examples = [Example([Image.new("RGB", (16, 16), color)], [("What colour?", color)]) for color in colors]
        return collate([encode(example, processor) for example in examples])

    return batch


@pytest.fixture(scope="module")
def learn(processor, batch):
    """Train a model of this seed into a folder; returns the lines it logged."""

    def learn(folder, cfg=CFG, batch=batch, seed=0, shape=processor.cfg, **options):
        torch.manual_seed(seed)
        model = VisionLanguageModel(shape, processor.tokenizer.image_token_id)
        with log_lines() as lines:
            train(model, processor.tokenizer.to_json(), batch, cfg, folder, **options)
        return lines

    return learn


def without(entry, *names):
    return {name: value for name, value in entry.items() if name not in names}


def files(folder):
    """The contents of a folder: texts, and digests of weights and optimizer state."""
    contents = {}
    for path in folder.rglob("*.*"):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "metrics.jsonl":  # time and memory differ from run to run
            lines = path.read_text().splitlines()
            contents[name] = [without(json.loads(line), "tokens_per_s", "memory") for line in lines]
        elif path.is_file():
            contents[name] = path.read_text(encoding="utf-8")
    return contents


@pytest.fixture(scope="module")
def whole(learn, tmp_path_factory):
    """The files of a run of six steps without interruption."""
    learn(folder := tmp_path_factory.mktemp("whole") / "run")
    return files(folder)


def failing_at(number, batch, error=KeyboardInterrupt):
    def get_batch(i):
        if i == number:
            raise error
        return batch(i)

    return get_batch


# ---------------------------------------------------------------------------------------------------- reproducibility


def test_the_same_run_twice_writes_the_same_files_and_a_third_time_trains_nothing(learn, batch, whole, tmp_path):
    learn(tmp_path)
    assert files(tmp_path) == whole
    learn(tmp_path, batch=failing_at(0, batch))
    assert files(tmp_path) == whole


def test_a_first_loss_that_is_not_a_number_is_not_blamed_on_the_learning_rate(learn, batch, tmp_path):
    with pytest.raises(TrainingError, match="step 0 has loss nan.*--dtype float32.*--check-data") as caught:
        learn(tmp_path, batch=lambda i: batch(i) | {"images": batch(i)["images"] * math.nan})
    assert "lower lr" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_keeps_its_class_and_message(learn, batch, tmp_path, num_workers):
    """A DataLoader's worker would put a traceback into the message."""
    with pytest.raises(DataError) as caught:
        learn(tmp_path, replace(CFG, num_workers=num_workers), failing_at(1, batch, DataError("cat.png is damaged")))
    assert str(caught.value) == "cat.png is damaged"


def test_a_worker_changes_nothing(learn, processor, tmp_path):
    get_batch = SceneBatches(processor, CFG.batch_size, CFG.seed)
    for workers in (0, 1):
        learn(tmp_path / str(workers), replace(CFG, num_workers=workers), get_batch)
    assert files(tmp_path / "0")["model.safetensors"] == files(tmp_path / "1")["model.safetensors"]


# ------------------------------------------------------------------------------------------------------------- files


def test_the_final_model_is_the_last_checkpoint(whole):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert whole[name] == whole[f"checkpoints/step-6/{name}"]


def test_every_checkpoint_is_a_model(learn, batch, tmp_path):
    captions = []

    def get_batch(number):
        for folder in tmp_path.glob("run/checkpoints/*"):
            captioner = Captioner.from_pretrained(folder, dtype="float32")
            captions.append((folder.name, captioner.caption(Image.new("RGB", (9, 9)), max_new_tokens=2)))
        return batch(number)

    learn(tmp_path / "run", replace(CFG, save_every=2), batch=get_batch)
    assert [name for name, _ in captions] == ["step-2", "step-2", "step-4", "step-4"]


def test_files_hold_numbers_and_text_only(whole):
    assert {name.rpartition(".")[2] for name in whole} == {"json", "jsonl", "safetensors"}  # nothing that could run
    for name, content in whole.items():
        assert json.loads(content) if name.endswith("json") else content
    state = json.loads(whole["checkpoints/step-6/training.json"])
    held_out, data = state["config"].pop("validation"), state["config"].pop("data")
    assert not held_out and data is None
    assert state["step"] == 6 and TrainConfig(**state["config"]) == CFG


# ---------------------------------------------------------------------------------------------------------- learning


def test_it_learns(learn, processor, tmp_path):
    cfg = TrainConfig(max_steps=120, lr=1e-2, warmup_steps=5, save_every=1000, log_every=10, num_workers=0)
    shape = replace(processor.cfg, lm_dropout=0.0, vit_dropout=0.0)
    images = [Image.new("RGB", (16, 16), color) for color in COLORS]
    rows = [encode(Example([p], [("What colour?", c)]), processor) for p, c in zip(images, COLORS)]
    lines = learn(tmp_path / "run", cfg, lambda step: collate(rows), shape=shape)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[0] > 1 > 10 * losses[-1]
    captioner = Captioner.from_pretrained(tmp_path / "run", dtype="float32")
    assert list(captioner.captions(images, "What colour?", max_new_tokens=8)) == list(COLORS)


def test_questions_are_answered_with_the_weights_of_the_moment(processor, batch, learn, tmp_path):
    """What is answered during training is what the model written at that step generates."""
    image, captions = Image.new("RGB", (16, 16), "red"), []

    def answer(model, everything):
        captions.append(Captioner(model, processor).caption(image, max_new_tokens=6))
        return Evaluation([])

    cfg = replace(CFG, lr=1e-2, save_every=2, validate_every=2, keep_checkpoints=9, dtype="float32")
    learn(tmp_path, cfg, answer_questions=answer)
    for caption, step in zip(captions[1:], (2, 4, 6)):
        captioner = Captioner.from_pretrained(tmp_path / f"checkpoints/step-{step}", dtype="float32")
        assert caption == captioner.caption(image, max_new_tokens=6)
    assert len(set(captions)) > 1
