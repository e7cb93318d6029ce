"""Training on plain images and their colors: it learns, and each checkpoint is a model."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from models.config import extra_tokens
from models.vision_language_model import VisionLanguageModel
from nanovlm import Captioner
from nanovlm.data.examples import Example, collate, encode
from nanovlm.errors import UsageError
from nanovlm.evaluation import Evaluation
from nanovlm.processing.processor import Processor
from nanovlm.synthetic.recipe import SceneBatches
from nanovlm.training.checkpointing import write_model
from nanovlm.training.config import TrainConfig
from support import another_run
from support.logs import log_lines
from support.training import train

COLORS = ("red", "green", "blue", "black")
IMAGES = [Image.new("RGB", (16, 16), color) for color in COLORS]
CFG = TrainConfig(max_steps=6, batch_size=2, lr=1e-2, warmup_steps=2, save_every=2, log_every=10, num_workers=0)


@pytest.fixture(scope="module")
def processor(model_and_processor, tiny_config):
    """For a model of one tile."""
    tokenizer = model_and_processor[1].tokenizer
    sizes = {"lm_vocab_size": len(tokenizer), "lm_max_position_embeddings": 256}
    cfg = tiny_config(max_img_size=16, vlm_extra_tokens=extra_tokens(0), **sizes)
    return Processor(cfg, tokenizer)


@pytest.fixture(scope="module")
def batch(processor):
    """The four images and their colors."""
    rows = [encode(Example([p], [("What colour?", c)]), processor) for p, c in zip(IMAGES, COLORS)]
    return lambda number: collate(rows)


@pytest.fixture(scope="module")
def learn(processor, batch):
    """Train a model into a folder; returns the lines it logged."""

    def learn(folder, cfg=CFG, batch=batch, **options):
        torch.manual_seed(0)
        model = VisionLanguageModel(processor.cfg, processor.tokenizer.image_token_id)
        with log_lines() as lines:
            train(model, processor.tokenizer.to_json(), batch, cfg, folder, **options)
        return lines

    return learn


def test_it_learns(learn, tmp_path):
    lines = learn(tmp_path, replace(CFG, max_steps=120, warmup_steps=5, save_every=1000))
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert losses[0] > 1 > 10 * losses[-1]
    captioner = Captioner.from_pretrained(tmp_path, dtype="float32")
    assert list(captioner.captions(IMAGES, "What colour?", max_new_tokens=8)) == list(COLORS)


def test_two_runs_at_once_are_refused(learn, tmp_path):
    with another_run(tmp_path), pytest.raises(UsageError, match="another run writes there; wait for its end"):
        learn(tmp_path)
    locked = []

    def write(folder, *args):
        locked.append((tmp_path / ".train.lock").exists())
        write_model(folder, *args)

    learn(tmp_path, write_model=write)
    assert locked == [True] * 4  # the final model, too
    assert not (tmp_path / ".train.lock").exists()


def test_a_worker_changes_nothing(learn, processor, tmp_path):
    get_batch = SceneBatches(processor, CFG.batch_size, CFG.seed)
    for workers in (0, 1):
        learn(tmp_path / str(workers), replace(CFG, num_workers=workers), get_batch)
    alone, beside = ((tmp_path / name / "model.safetensors").read_bytes() for name in "01")
    assert alone == beside


def test_questions_are_answered_with_the_weights_of_the_moment(processor, learn, tmp_path):
    """What is answered during training is what the model written at that step generates."""
    captions = []

    def answer(model, everything):
        captions.append(Captioner(model, processor).caption(IMAGES[0], max_new_tokens=6))
        return Evaluation([])

    learn(tmp_path, replace(CFG, validate_every=2, keep_checkpoints=9, dtype="float32"), answer_questions=answer)
    for caption, step in zip(captions[1:], (2, 4, 6)):
        captioner = Captioner.from_pretrained(tmp_path / f"checkpoints/step-{step}", dtype="float32")
        assert caption == captioner.caption(IMAGES[0], max_new_tokens=6)
    assert len(set(captions)) > 1
