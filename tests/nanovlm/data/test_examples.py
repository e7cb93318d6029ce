"""Training sees what generation reads and writes, and packing changes no loss."""

import random
import re
from dataclasses import replace

import pytest
import torch

from models.config import CHATML
from nanovlm.data.examples import IGNORE_INDEX, EncodedExample, Example, ExampleError, collate, encode, pack, questions
from nanovlm.processing.conversation import Turn, dialogue
from nanovlm.processing.convert import convert_layout
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from support import noise_image
from support.data import about

ONE, TWO = [noise_image(16, 16)], [noise_image(30, 14, 2), noise_image(16, 16, 3)]
PAIRS = [("What is this?", "A red star."), ("How many stars are there? " * 3, "one"), ("?", "-"), ("Is it red?", "yes")]
TURNS = ["What is this?", "A red star.", "Is it red?", "yes", "Where\nis it? <|im_end|>", "To the left."]
EXAMPLES = {
    "one tile": about(ONE, *PAIRS),
    "tiles": about([noise_image(30, 48, 1)], *PAIRS[1:]),
    "two images": about(TWO, *PAIRS[:2]),
    "no image": about([], *PAIRS),
    "one answer": about([], *PAIRS[3:]),
    "special tokens as text": about(ONE, ("What is <|image|>?", "It is <|im_end|>, as text.")),
}


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


def mask(example, texts):
    """The example, in which answers of these texts are not learned."""
    return replace(example, chats=[[replace(t, learned=t.text not in texts) for t in chat] for chat in example.chats])


def test_a_masked_answer_is_read_but_not_learned(processor):
    everything, masked = (encode(mask(about(ONE, TURNS), texts), processor) for texts in ((), ["yes"]))
    assert masked.ids == everything.ids
    left = [target for target in masked.targets if target != IGNORE_INDEX]
    assert left == [i for k in (1, 5) for i in processor.tokenizer.encode_answer(TURNS[k])]
    alone = encode(about(ONE, PAIRS[0]), processor)
    assert encode(mask(about(ONE, *PAIRS[:2]), ["one"]), processor).ids == alone.ids


def test_nanovlms_layout_reads_images_before_all_text(processor):
    """Images of a later turn move to the first, behind the system's text, and masks stay."""
    chats = [
        [Turn("system", ["S."]), Turn("user", [*first, "Hi"]), Turn("assistant", ["Ho"]), Turn("user", [*then, "Q?"])]
        for first, then in (([None], ()), ((), [None]), ((), ()))
    ]
    first, later, none = ([*chat, Turn("assistant", ["A."])] for chat in chats)
    later[2] = replace(later[2], learned=False)
    rows = [encode(Example(ONE * bool(chat is not none), [chat]), processor) for chat in (first, later)]
    assert rows[0].ids == rows[1].ids and rows[0].targets != rows[1].targets
    asked = questions([("x", Example(ONE, [later]))])
    assert [(len(one.images), one.prompt) for one in asked] == [(1, "Q?")]
    with pytest.raises(ExampleError, match="1 images for a conversation that has places for 0"):
        encode(Example(ONE, [none]), processor)


REFUSED = {
    "no answer": (ONE, [], "a.png has no answer to learn"),
    "an empty answer": (ONE, [("Hi", "Ho"), ("What? yes", " \n")], "a.png has an empty answer to 'What. yes'"),
    "too long": (ONE, [("What?", "x " * 1100)], r"a.png: \d+ tokens, \d+ of .* lm_max_position_embeddings=1024"),
    "40 MB": (ONE, [("What?", "x " * 20_000_000)], r"a.png: prompt is too long: 40,000,\d+ bytes of text"),
    "many images": (["gone.jpg"] * 9000, PAIRS[:1], r"a.png: 9,000 images of .*,000 tokens .*=1024; use fewer"),
    "many answers": (ONE, [("?", "x")] * 9000, r"a.png: prompt is too long: 18,000 bytes"),
    "many turns": (ONE, [["?", "x"] * 1000], r"a.png: \d+ tokens, \d+ of .* lm_max_position_embeddings=1024"),
    "no image": ([b"hello"], PAIRS, "a.png: not an image"),
    "no file": (["gone.jpg"], PAIRS, "a.png: gone.jpg: No such file"),
}


@pytest.mark.parametrize(("images", "pairs", "words"), REFUSED.values(), ids=REFUSED)
def test_example_that_would_teach_something_else_is_refused(images, pairs, words, processor):
    with pytest.raises(ExampleError, match=f"^{words}[^\n]*$"):
        encode(about(images, *pairs, name="a.png"), processor)


def test_conversations_that_a_template_changes_or_that_begin_differently_are_refused(processor, tiled):
    cfg = replace(processor.cfg, lm_chat_template=CHATML.replace("['content']", "['content'].lower()"))
    lowering = Processor(cfg, Tokenizer(processor.tokenizer.backend, cfg))
    with pytest.raises(ExampleError, match=re.escape("7.json[1]: in turn 3 ")):
        encode(about([], ["a", "B", "c", "d"], name="7.json[1]"), lowering)
    _, smol = convert_layout(tiled[0], tiled[1].tokenizer)
    chats = [[Turn("system", [text]), *dialogue(["What?", "A."], [None])] for text in ("Be brief.", "Be long.")]
    assert encode(Example(ONE, chats[:1] * 2), smol).mask[-1] == 3
    with pytest.raises(ExampleError, match="example: its conversations begin differently"):
        encode(Example(ONE, chats), smol)


def test_length_is_not_rounded_up_beyond_the_limit(processor):
    row = encode(EXAMPLES["no image"], processor)
    n = len(row.ids)
    assert n % 8 and collate([row], max_length=n)["input_ids"].size(1) == n
    assert collate([row], max_length=n + 8)["input_ids"].size(1) == collate([row])["input_ids"].size(1) == n + -n % 8


@pytest.mark.parametrize(("length", "n_rows"), [(10**6, [1]), (150, [2, 3]), (1, [6])])
def test_packed_loss_and_gradients_equal_those_of_the_samples_alone(tiled, length, n_rows):
    model, processor = tiled
    rows = [encode(example, processor) for example in EXAMPLES.values()]
    batch = collate(pack(rows, length))
    assert len(batch["input_ids"]) in n_rows
    model.zero_grad()
    _, loss = model(**batch)
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    count, total = sum(t != IGNORE_INDEX for row in rows for t in row.targets), 0
    for row in rows:
        alone = {"input_ids": [row.ids], "targets": [row.targets], "attention_mask": [row.mask]}
        images = torch.cat(row.images) if row.images else None
        _, one = model(**{name: torch.tensor(value) for name, value in alone.items()}, images=images)
        one = one * sum(t != IGNORE_INDEX for t in row.targets) / count
        one.backward()
        total += one.item()
    assert loss.item() == pytest.approx(total, abs=1e-5)
    torch.testing.assert_close(packed, {n: p.grad for n, p in model.named_parameters()}, atol=1e-5, rtol=1e-4)
    model.zero_grad()


def test_packing_loses_nothing_keeps_the_limit_and_leaves_no_two_rows_that_fit_together():
    rng = random.Random(0)
    for _ in range(20):
        lengths, limit = rng.choices(range(1, 101), k=rng.randint(1, 40)), rng.randint(1, 120)
        plain = [EncodedExample([7] * n, [-100] * (n - 1) + [8], [1] * n) for n in lengths]
        packed = [(len(row.ids), row.targets.count(8)) for row in pack(plain, limit)]
        assert sum(length for length, _ in packed) == sum(lengths) and sum(n for _, n in packed) == len(lengths)
        assert all(length <= limit or n == 1 for length, n in packed)
        short = sorted(length for length, _ in packed if length <= limit)
        assert len(short) < 2 or short[0] + short[1] > limit
    best = pack([EncodedExample([7] * n, [8] * n, [1] * n) for n in (50, 60, 40)], 100)
    assert sorted(len(row.ids) for row in best) == [50, 100], "the best fit"
