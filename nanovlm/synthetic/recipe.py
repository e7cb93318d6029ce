"""How the embedded model is made: its config, its tokenizer, and the batches it is trained on.

Every batch is a pure function of the seed and the step. The schedules below (step -> value from that step on) reproduce
the published weights; a change of anything here, even of the order of random draws, changes the training data.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from models.config import VLMConfig, extra_tokens
from models.vision_language_model import VisionLanguageModel
from nanovlm import PROMPT
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, Example, collate, encode
from nanovlm.data.packing import pack as pack_examples
from nanovlm.data.source import Source
from nanovlm.processor import Processor
from nanovlm.synthetic.captions import caption, questions
from nanovlm.synthetic.drawing import draw
from nanovlm.synthetic.scene import COLORS, Scene, random_scene, with_unnamed_colors
from nanovlm.tokenizer import Tokenizer

# Prompts that ask for a caption; the first is the default prompt everywhere.
CAPTION_PROMPTS = (
    PROMPT,
    "Describe the image.",
    "Caption this image.",
    "What is this?",
    "What is in this picture?",
    "What do you see?",
)
N_QUESTIONS = 5  # questions per training image beside its caption, each answered independently
N_CONVERSATION_QUESTIONS = 8  # the same in a multi-turn example
IMAGE_SIDES = (96, 256)  # range of the training images' sides, in pixels
BASE_VOCAB_SIZE = 512
WORD_DROPOUT = {0: 0.0, 4500: 0.2, 5700: 0.5}  # probability that an earlier word of an answer is masked in the input
UNNAMED_SHARE = {0: 0.0, 6300: 0.4}  # share of scenes in colors that have no name here
CONVERSATION_SHARE = {0: 0.0, 7800: 0.5}  # share of multi-turn examples
CHECKPOINT_DTYPE = torch.float16  # rounds these weights 8 times finer than bfloat16 in the same 2 bytes


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE that encodes every word of the scenes as one token and any other text in pieces."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    base = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(list(extra_tokens(0).values()))
    assert tokenizer.get_vocab_size() == base + 2
    return tokenizer


def _corpus() -> Iterator[str]:
    rng = Random("corpus")
    for _ in range(2000):
        example = scene_example(random_scene(rng), rng, n_questions=20, size=None)
        for prompt, answer in example.qa_pairs:
            yield from ("user\n", prompt, "assistant\n", answer)


def make_config(tokenizer: tokenizers.Tokenizer) -> VLMConfig:
    """3 million parameters, images of 96 x 96 pixels."""
    vocab_size = tokenizer.get_vocab_size()
    return VLMConfig(
        vit_hidden_dim=128,
        vit_inter_dim=512,
        vit_patch_size=8,
        vit_img_size=96,
        vit_n_heads=4,
        vit_n_blocks=4,
        vit_model_type="none",
        lm_hidden_dim=192,
        lm_inter_dim=512,
        lm_re_base=10000,
        lm_max_position_embeddings=1024,
        lm_base_vocab_size=vocab_size - 2,
        extra_token_amount=2,
        lm_vocab_size=vocab_size,
        lm_n_heads=6,
        lm_n_kv_heads=2,
        lm_n_blocks=6,
        lm_max_length=1024,
        lm_model_type="none",
        lm_tokenizer="none",
        mp_pixel_shuffle_factor=2,
        mp_image_token_length=36,
        max_img_size=96,
        vlm_extra_tokens=extra_tokens(0),
        vlm_load_backbone_weights=False,
    )


def make_model(seed: int) -> tuple[VisionLanguageModel, Processor]:
    """The untrained model, initialized from seed, and its processor."""
    backend = make_tokenizer()
    cfg = make_config(backend)
    tokenizer = Tokenizer(backend, cfg)
    assert tokenizer.image_token_id is not None, "make_tokenizer adds it"
    torch.manual_seed(seed)
    return VisionLanguageModel(cfg, tokenizer.image_token_id), Processor(cfg, tokenizer)


def scene_example(
    scene: Scene, rng: Random, n_questions: int, size: tuple[int, int] | None, colorless: bool = False
) -> Example:
    """A scene's image of size (width, height) with a caption and the first n_questions of its questions.

    Without a size there is no image. A colorless example leaves out the questions that mention or ask for a color.
    """
    asked = questions(scene, rng)
    if colorless:
        asked = [pair for pair in asked if COLORS.keys().isdisjoint(re.findall(r"\w+", " ".join(pair)))]
    asked = [(_as_typed(question, rng), answer) for question, answer in asked[:n_questions]]
    prompt = CAPTION_PROMPTS[0] if rng.random() < 0.5 else rng.choice(CAPTION_PROMPTS)
    images = [draw(scene, *size)] if size else []
    return Example(images, [(_as_typed(prompt, rng), caption(scene)), *asked])


def as_conversation(example: Example, rng: Random) -> Example:
    """The example's pairs in random order as the turns of one conversation."""
    return replace(example, qa_pairs=rng.sample(example.qa_pairs, len(example.qa_pairs)), multi_turn=True)


def random_example(rng: Random, name: str = "example") -> Example:
    """A fresh scene as training shows it."""
    size, scene = _random_size(rng), random_scene(rng)
    return replace(scene_example(scene, rng, N_QUESTIONS, size), name=name)


def _random_size(rng: Random) -> tuple[int, int]:
    low, high = IMAGE_SIDES
    width = rng.randint(low, high)
    return width, min(high, max(low, round(width * rng.uniform(0.75, 1.33))))


def scene_source() -> Source:
    """Scenes as a source of examples; mixed into other data they keep the model from forgetting its original domain."""
    return Source("scenes", range(10**6), _example_of_number, endless=True)


def _example_of_number(number: int, name: str) -> Example:
    return random_example(Random(f"scene {number}"), name)


def _as_typed(prompt: str, rng: Random) -> str:
    """The prompt, sometimes as people type it: in American spelling, in lower case, without the final mark."""
    if rng.random() < 0.3:
        prompt = prompt.replace("colour", "color")
    if rng.random() < 0.1:
        prompt = prompt.lower()
    if rng.random() < 0.1:
        prompt = prompt.rstrip("?.")
    return prompt


def batches(
    processor: Processor,
    *,
    batch_size: int,
    seed: int,
    pack: int = 0,
    conversation_share: Mapping[int, float] = CONVERSATION_SHARE,
) -> Callable[[int], dict[str, Tensor | None]]:
    """A function step -> batch of fresh scenes, see `collate`; it is pure and can be pickled.

    pack joins examples into rows of at most that many tokens; 0 gives each example a row.
    """
    return partial(_batch, processor, batch_size, seed, pack, conversation_share)


def _batch(
    processor: Processor, batch_size: int, seed: int, pack: int, conversation_share: Mapping[int, float], step: int
) -> dict[str, Tensor | None]:
    rng = Random(f"{seed} {step}")
    schedules = (WORD_DROPOUT, UNNAMED_SHARE, conversation_share)
    dropout, unnamed_share, multi_turn_share = (schedule_value(schedule, step) for schedule in schedules)
    rows = [_encoded(processor, rng, dropout, unnamed_share, multi_turn_share) for _ in range(batch_size)]
    limit = processor.cfg.lm_max_position_embeddings
    return collate(pack_examples(rows, min(pack, limit)) if pack else rows, max_length=limit)


def _encoded(
    processor: Processor, rng: Random, dropout: float, unnamed_share: float, multi_turn_share: float
) -> EncodedExample:
    size, scene = _random_size(rng), random_scene(rng)
    colorless = unnamed_share > 0 and rng.random() < unnamed_share
    if colorless:
        scene = with_unnamed_colors(scene, rng)
    multi_turn = multi_turn_share > 0 and rng.random() < multi_turn_share
    example = scene_example(scene, rng, N_CONVERSATION_QUESTIONS if multi_turn else N_QUESTIONS, size, colorless)
    if multi_turn:
        example = as_conversation(example, rng)
        dropout /= 2  # a masked word stays masked for all later turns
    row = encode(example, processor)
    if dropout:
        row = drop_words(row, rng, dropout)
    return mask_tokens(row, color_token_ids(processor.tokenizer)) if colorless else row


def schedule_value(schedule: Mapping[int, float], step: int) -> float:
    """The value of the latest entry at or before step."""
    return schedule[max(start for start in schedule if start <= step)]


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
