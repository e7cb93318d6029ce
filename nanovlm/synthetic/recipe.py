"""Recipe of the embedded model: new weights, and the batches that they are trained on.

Every batch is a pure function of the seed and the step. The schedules below (step -> value from that step on) reproduce
the published weights; a change of anything here, even of the order of random draws, changes the training data.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from models.vision_language_model import VisionLanguageModel
from nanovlm.captioner import Captioner
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, Example, collate, encode
from nanovlm.data.source import Source
from nanovlm.embedded import EMBEDDED, PROMPT
from nanovlm.processing.conversation import dialogue
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from nanovlm.synthetic.captions import RELATIONS, caption, questions, short_caption
from nanovlm.synthetic.drawing import draw
from nanovlm.synthetic.scene import COLORS, Scene, random_scene, with_unnamed_colors

T = TypeVar("T")

# Prompts that ask for a caption; the first is the default prompt everywhere.
CAPTION_PROMPTS = (
    PROMPT, "Describe the image.", "Caption this image.", "What is this?", "What is in this picture?",
    "What do you see?", "Describe", "Caption", "Describe this image.", "Describe what you see.",
    "Describe this picture in detail.", "Describe the image in detail.", "Write a caption.",
    "Write a detailed caption.", "What does the picture show?",
)  # fmt: skip
SHORT_PROMPTS = ("Describe this picture in a few words.", "Write a short caption.")  # for colors and shapes only
READING_PROMPTS = ("What does it say?", "Read the text.", "What is written here?", "What does the sign say?")
NO_TEXT = "nothing"  # the answer to them
REWORDINGS = {  # other ways to put a part of a question
    "How many objects are there?": (
        *("How many shapes are there?", "How many shapes?", "How many objects?", "How many things are there?"),
        *("How many shapes do you see?", "Count the objects.", "Count the shapes."),
    ),
    "What colour is": ("Which colour is", "What is the colour of"),
    "What shape is": ("Which shape is",),
    "How big is": ("What size is",),
    "What is the background like?": ("What is the background?", "Describe the background."),
    "left of": ("to the left of",),
    "right of": ("to the right of",),
    "Is there": ("Do you see", "Can you see"),
}
REWORDED_SHARE = 0.25  # of questions that can be put in another way
IMAGE_SIDES = (96, 256)  # range of the training images' sides, in pixels
# Schedules: step -> value from that step on. Captions of single shapes first teach the encoder to see.
MAX_SHAPES = {0: 1, 500: 2, 900: 4}
N_QUESTIONS = {0: 0, 500: 5}  # per image beside its caption, each answered independently
N_RELATION_QUESTIONS = 2  # more of those that compare the places of two shapes, which are learned last
N_CONVERSATION_QUESTIONS = 9  # of an example whose questions follow each other
ROW_LENGTH = {0: 64, 500: 128, 900: 160, 2500: 200}  # tokens; conversations need more. Longer rows are cut
WORD_DROPOUT = {0: 0.0, 1300: 0.2, 2300: 0.4}  # probability that an earlier word of an answer is masked in the input
UNNAMED_SHARE = {0: 0.0, 900: 0.3}  # share of scenes in colors that have no name here
VARIED = {0: False, 4096: True}  # whether patterns and hearts vary as widely as `draw` can
CONVERSATION_SHARE = {0: 0.0, 2500: 0.4}  # share of multi-turn examples
CHECKPOINT_DTYPE = torch.float16  # rounds these weights 8 times finer than bfloat16 in the same 2 bytes


def make_model(seed: int) -> tuple[VisionLanguageModel, Processor]:
    """The embedded model with new weights, initialized from seed, and its processor."""
    embedded = Captioner.from_pretrained(EMBEDDED, "cpu", "float32")
    torch.manual_seed(seed)
    return VisionLanguageModel(embedded.model.cfg, embedded.model.image_token_id), embedded.processor


def scene_example(
    scene: Scene,
    rng: Random,
    n_questions: int,
    size: tuple[int, int],
    colorless: bool = False,
    varied: bool = True,
) -> Example:
    """A scene's image of size (width, height) with a caption and the first n_questions of its questions.

    N_RELATION_QUESTIONS more compare the places of two shapes. A colorless example leaves out the questions that
    mention or ask for a color.
    """
    pairs = questions(scene, rng)
    if colorless:
        pairs = [pair for pair in pairs if COLORS.keys().isdisjoint(re.findall(r"\w+", " ".join(pair)))]
    first = pairs[:n_questions]
    rest = pairs[n_questions:]
    if n_questions:
        about_places = [pair for pair in rest if any(f" {relation} " in pair[0] for relation in RELATIONS)]
        first += about_places[:N_RELATION_QUESTIONS]
        first += [(rng.choice(READING_PROMPTS), NO_TEXT)] * (rng.random() < 0.05)
    rng.shuffle(first)
    if rng.random() < 0.08 and not colorless:
        asked = rng.choice(SHORT_PROMPTS), short_caption(scene)
    else:
        asked = PROMPT if rng.random() < 0.4 else rng.choice(CAPTION_PROMPTS), caption(scene)
    chats = [dialogue((_as_typed(prompt, rng), answer), [None]) for prompt, answer in (asked, *first)]
    return Example([draw(scene, *size, varied)], chats)


def _random_size(rng: Random) -> tuple[int, int]:
    low, high = IMAGE_SIDES
    width = rng.randint(low, high)
    return width, min(high, max(low, round(width * rng.uniform(0.75, 1.33))))


def scene_source() -> Source:
    """Scenes as a source of examples; mixed into other data they keep the model from forgetting its original domain."""
    return Source("scenes", range(10**6), _numbered_example, endless=True)


def _numbered_example(number: int) -> Example:
    rng = Random(f"scene {number}")
    size = _random_size(rng)
    scene = random_scene(rng)
    return replace(scene_example(scene, rng, max(N_QUESTIONS.values()), size), name=f"scenes[{number}]")


def _as_typed(prompt: str, rng: Random) -> str:
    """Vary a prompt as people do: other words, American spelling, lower case, no question mark."""
    for part, alternatives in REWORDINGS.items():
        if part in prompt and rng.random() < REWORDED_SHARE:
            prompt = prompt.replace(part, rng.choice(alternatives))
    if rng.random() < 0.3:
        prompt = prompt.replace("colour", "color")
    if rng.random() < 0.1:
        prompt = prompt.lower()
    if rng.random() < 0.1:
        prompt = prompt.rstrip("?.")
    return prompt


@dataclass(frozen=True)
class SceneBatches:
    """A function step -> batch of fresh scenes, see `collate`; it is pure and can be pickled.

    Every batch of a part of the schedule has the same shape, (batch_size, ROW_LENGTH) tokens.
    """

    processor: Processor
    batch_size: int
    seed: int

    def __call__(self, step: int) -> dict[str, Tensor | None]:
        rng = Random(f"{self.seed} {step}")
        length = at(step, ROW_LENGTH)
        rows = [_of_length(length, self._row(rng, step)) for _ in range(self.batch_size)]
        return collate(rows, max_length=length)

    def _row(self, rng: Random, step: int) -> EncodedExample:
        size = _random_size(rng)
        scene = random_scene(rng, max_shapes=at(step, MAX_SHAPES))
        colorless = rng.random() < at(step, UNNAMED_SHARE)
        multi_turn = rng.random() < at(step, CONVERSATION_SHARE)
        if colorless:
            scene = with_unnamed_colors(scene, rng)
        n_questions = N_CONVERSATION_QUESTIONS if multi_turn else at(step, N_QUESTIONS)
        example = scene_example(scene, rng, n_questions, size, colorless, at(step, VARIED))
        dropout = at(step, WORD_DROPOUT)
        if multi_turn:  # the turns in random order
            turns = chain.from_iterable(rng.sample(example.chats, len(example.chats)))
            example = replace(example, chats=[dialogue([turn.text for turn in turns], [None])])
            dropout /= 2  # a masked word stays masked for all later turns
        row = drop_words(encode(example, self.processor), rng, dropout)
        return mask_tokens(row, color_token_ids(self.processor.tokenizer)) if colorless else row


def at(step: int, schedule: Mapping[int, T]) -> T:
    """Value of a schedule at a step: its last entry up to there."""
    return schedule[max(start for start in schedule if start <= step)]


def _of_length(length: int, row: EncodedExample) -> EncodedExample:
    """The row cut, or padded with tokens outside of any sample, to length tokens."""

    def fitted(ids: list[int], pad: int = 0) -> list[int]:
        return (ids + [pad] * length)[:length]

    return replace(row, ids=fitted(row.ids), targets=fitted(row.targets, IGNORE_INDEX), mask=fitted(row.mask))


# Two ways to make the model look a shape up in the image instead of guessing it from its color


def drop_words(row: EncodedExample, rng: Random, probability: float, blank: int = 0) -> EncodedExample:
    """Word dropout (Bowman et al. 2016): replace answer tokens in the input, but not in the targets, by blank."""
    ids = list(row.ids)
    for t in range(1, len(ids)):
        in_answer = row.targets[t - 1] == ids[t] and row.mask[t - 1] == row.mask[t]
        if in_answer and rng.random() < probability:
            ids[t] = blank
    return replace(row, ids=ids)


def mask_tokens(row: EncodedExample, token_ids: Collection[int], blank: int = 0) -> EncodedExample:
    """Replace the given tokens by blank in the input and leave them out of the loss."""
    ids = [blank if i in token_ids else i for i in row.ids]
    return replace(row, ids=ids, targets=[IGNORE_INDEX if i in token_ids else i for i in row.targets])


def color_token_ids(tokenizer: Tokenizer) -> set[int]:
    """The token ids of the color names; each is one token."""
    return {i for color in COLORS for i in tokenizer.encode(f" {color}")}
