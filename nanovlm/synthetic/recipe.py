"""How the embedded model is made: its shape, its tokenizer, and the batches it learns from."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from random import Random

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.config import VLMConfig, extra_tokens
from models.vision_language_model import VisionLanguageModel
from nanovlm import PROMPT
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, Example, collate, encode
from nanovlm.data.packing import pack
from nanovlm.data.source import Source
from nanovlm.processor import Processor
from nanovlm.synthetic.captions import caption, questions
from nanovlm.synthetic.drawing import draw
from nanovlm.synthetic.scene import COLOURS, Scene, random_scene, unnamed
from nanovlm.tokenizer import Tokenizer
from nanovlm.training.config import TrainConfig

# What may ask for a caption; the first is the default prompt of every door.
CAPTION_PROMPTS = (
    PROMPT,
    "Describe the image.",
    "Caption this image.",
    "What is this?",
    "What is in this picture?",
    "What do you see?",
)
N_QUESTIONS, N_IN_TALK = 5, 8  # asked of a training picture beside its caption: apart, or in one conversation
SIDES = (96, 256)  # of training pictures, in pixels
BASE_VOCAB = 512
FORGETS = {0: 0.0, 4500: 0.2, 5700: 0.5}  # from which step on, how often a word already said can not be read
UNNAMED = {0: 0.0, 6300: 0.4}  # from which step on, the share of scenes in colours without a name
TALKS = {0: 0.0, 7800: 0.5}  # from which step on, the share of conversations
STORED_AS = torch.float16  # rounds these weights 8 times finer than bfloat16, in the same 2 bytes


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE in which every word of the scenes is one token and any other text is spelled out."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB,
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
        for prompt, answer in example.answers:
            yield from ("user\n", prompt, "assistant\n", answer)


def make_config(tokenizer: tokenizers.Tokenizer) -> VLMConfig:
    """3 million parameters that look at 96 x 96 pixels."""
    vocabulary = tokenizer.get_vocab_size()
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
        lm_base_vocab_size=vocabulary - 2,
        extra_token_amount=2,
        lm_vocab_size=vocabulary,
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
    """The untrained model, its weights drawn from seed, and its processor."""
    backend = make_tokenizer()
    cfg = make_config(backend)
    tokenizer = Tokenizer(backend, cfg)
    torch.manual_seed(seed)
    return VisionLanguageModel(cfg, tokenizer.image_token_id), Processor(cfg, tokenizer)


def scene_example(
    scene: Scene, rng: Random, n_questions: int, size: tuple[int, int] | None, colourless: bool = False
) -> Example:
    """A scene's picture with a caption and the first of its questions; no picture without a size.

    A colourless example asks nothing that names a colour or is answered by one.
    """
    asked = questions(scene, rng)
    if colourless:
        asked = [pair for pair in asked if COLOURS.keys().isdisjoint(re.findall(r"\w+", " ".join(pair)))]
    asked = [(_as_typed(question, rng), answer) for question, answer in asked[:n_questions]]
    prompt = CAPTION_PROMPTS[0] if rng.random() < 0.5 else rng.choice(CAPTION_PROMPTS)
    pictures = [draw(scene, *size)] if size else []
    return Example(pictures, [(_as_typed(prompt, rng), caption(scene)), *asked])


def conversation(example: Example, rng: Random) -> Example:
    """The example's questions and caption in any order, each answered after all that was said before."""
    return replace(example, answers=rng.sample(example.answers, len(example.answers)), chain=True)


def drawn_example(rng: Random, name: str = "example") -> Example:
    """A fresh scene as training shows it."""
    size, scene = _size(rng), random_scene(rng)
    return replace(scene_example(scene, rng, N_QUESTIONS, size), name=name)


def _size(rng: Random) -> tuple[int, int]:
    width = rng.randint(*SIDES)
    return width, min(SIDES[1], max(SIDES[0], round(width * rng.uniform(0.75, 1.33))))


def scene_source() -> Source:
    """Scenes as a source of examples, to be mixed into others so that what was learned of them stays."""
    return Source("scenes", range(10**6), _numbered_example, endless=True)


def _numbered_example(number: int, name: str) -> Example:
    return drawn_example(Random(f"scene {number}"), name)


def _as_typed(prompt: str, rng: Random) -> str:
    """The prompt, sometimes as people type it: American, in lower case, without the last mark."""
    if rng.random() < 0.3:
        prompt = prompt.replace("colour", "color")
    if rng.random() < 0.1:
        prompt = prompt.lower()
    if rng.random() < 0.1:
        prompt = prompt.rstrip("?.")
    return prompt


def batches(processor: Processor, cfg: TrainConfig) -> Callable[[int], dict]:
    """step -> a batch of fresh scenes, a pure function of cfg.seed and the step; it can be sent to another process."""
    return partial(_batch, processor, cfg)


def _batch(processor: Processor, cfg: TrainConfig, step: int) -> dict:
    rng = Random(f"{cfg.seed} {step}")
    forgotten, nameless, talks = (at(step, schedule) for schedule in (FORGETS, UNNAMED, TALKS))
    rows = []
    for _ in range(cfg.batch_size):
        size, scene = _size(rng), random_scene(rng)
        colourless = nameless > 0 and rng.random() < nameless
        scene = unnamed(scene, rng) if colourless else scene
        talk = talks > 0 and rng.random() < talks
        example = scene_example(scene, rng, N_IN_TALK if talk else N_QUESTIONS, size, colourless)
        example = conversation(example, rng) if talk else example
        row = encode(example, processor)
        share = forgotten / 2 if talk else forgotten  # for what is hidden is so in later turns, too
        row = forget(row, rng, share) if forgotten else row
        rows.append(without(row, colour_ids(processor.tokenizer)) if colourless else row)
    limit = processor.cfg.lm_max_position_embeddings
    return collate(pack(rows, min(cfg.pack, limit)) if cfg.pack else rows, limit=limit)


def at(step: int, schedule: dict[int, float]) -> float:
    """What a schedule, from which step on -> value, says of a step."""
    return schedule[max(start for start in schedule if start <= step)]


# Two ways to have a shape looked up in the picture rather than guessed from its colour


def forget(row: EncodedExample, rng: Random, share: float, blank: int = 0) -> EncodedExample:
    """Word dropout (Bowman et al. 2016): make a share of the answers' words unreadable to those that follow them."""
    ids = list(row.ids)
    for t in range(1, len(ids)):
        said = row.targets[t - 1] == ids[t] and row.mask[t - 1] == row.mask[t]
        if said and rng.random() < share:
            ids[t] = blank
    return replace(row, ids=ids)


def without(row: EncodedExample, words: Collection[int], blank: int = 0) -> EncodedExample:
    """The row with these ids neither read nor asked for."""
    ids = [blank if i in words else i for i in row.ids]
    return replace(row, ids=ids, targets=[IGNORE_INDEX if i in words else i for i in row.targets])


def colour_ids(tokenizer: Tokenizer) -> set[int]:
    """The ids of the colours' names; each is one token."""
    return {i for colour in COLOURS for i in tokenizer.encode(f" {colour}")}
