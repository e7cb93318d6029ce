"""Training of a model by one call."""

from pathlib import Path

from PIL import Image

from nanovlm.evaluation import Evaluation
from nanovlm.evaluation.evaluate import Answer, Question
from nanovlm.processing.conversation import dialogue
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import Trainer, TrainingTask

CFG = TrainConfig(
    max_steps=6, lr=3e-3, warmup_steps=2, save_every=3, log_every=2, num_workers=0, dtype="float32", keep_checkpoints=1
)
COLORS = [("RGB", "red", "red"), ("L", 99, "gray"), ("RGBA", "blue", "blue"), ("RGB", "red", "red")]
# one is right, one is what HTML and TeX would take for markup
TEXTS = ["$\\frac{1}$ <b>", "gray", "gray", "red"]


def answer_questions(model, everything=True):
    """Answers to four questions, half of them right."""
    questions = [
        Question("mine", f"{i}.png", [Image.new(mode, (40, 30), color)], dialogue(["What color?"], [None]), [word])
        for i, (mode, color, word) in enumerate(COLORS)
    ]
    scores = [float(text == question.references[0]) for text, question in zip(TEXTS, questions)]
    return Evaluation([Answer(q, text, {"exact_match": s}) for q, text, s in zip(questions, TEXTS, scores)])


def train(model, tokenizer, get_batch, cfg, folder, **options):
    """Train model, write it to folder and return it; options are the other fields of TrainingTask."""
    return Trainer(model, TrainingTask(get_batch, tokenizer, Path(folder), **options), cfg).run()


def before_batch(number, action, batch):
    """batch, which calls the action before it returns the batch of this number."""

    def get_batch(i):
        if i == number:
            action()
        return batch(i)

    return get_batch
