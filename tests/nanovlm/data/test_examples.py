"""What training shows is what generation reads and says, and packing questions changes no loss."""

import random
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image

from models.config import CHATML
from nanovlm.data.examples import IGNORE_INDEX, Example, ExampleError, collate, encode, encode_checked
from nanovlm.processor import Processor
from nanovlm.tokenizer import Tokenizer


def noise(width, height, seed=0):
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


ANSWERS = [
    ("What is this?", "A red star."),
    ("How many stars are there? " * 3, "one"),
    ("?", ""),
    ("Is it red?", "yes"),
]
EXAMPLES = [
    Example([noise(16, 16)], ANSWERS),
    Example([noise(30, 48, 1)], ANSWERS[1:]),
    Example([noise(30, 14, 2), noise(16, 16, 3)], ANSWERS[:2]),
    Example([], ANSWERS),
    Example([noise(16, 16, 4)], [("What is <|image|>?", "It is <|im_end|>, as text.")]),
]
DESCRIBED = ["one tile", "tiles", "two pictures", "no picture", "look-alikes"]


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


def alone(example, question, processor):
    """One question as generation meets it: the ids it reads, and the ids it should say."""
    prompt, answer = example.answers[question]
    read = processor([example.pictures], [prompt])["input_ids"][0].tolist()
    return read, [*processor.tokenizer.encode(answer), processor.tokenizer.special_id("<|im_end|>")]


@pytest.mark.parametrize("example", EXAMPLES, ids=DESCRIBED)
def test_every_branch_reads_what_generation_reads_and_says(example, processor):
    row = encode(example, processor)
    assert len(row.ids) == len(row.targets) == len(row.mask)
    assert sorted(row.mask) == row.mask, "the trunk, then a branch after the other"
    for question in range(len(example.answers)):
        seen = [i for i, branch in enumerate(row.mask) if branch in (1, question + 2)]
        read, said = alone(example, question, processor)
        assert [row.ids[i] for i in seen] == (read + said)[:-1]
        assert [row.targets[i] for i in seen] == [IGNORE_INDEX] * (len(read) - 1) + said


def test_pictures_are_read_once(processor):
    row = encode(EXAMPLES[1], processor)
    assert row.ids.count(processor.tokenizer.image_token_id) == 4 * 7 == 4 * len(torch.cat(row.images))
    assert {row.mask[i] for i, id in enumerate(row.ids) if id == processor.tokenizer.image_token_id} == {1}


def test_the_packed_loss_is_the_mean_over_the_answers_tokens(tiled):
    model, processor = tiled
    with torch.no_grad():
        _, packed = model(**collate([encode(example, processor) for example in EXAMPLES]))
        losses = []
        for example in EXAMPLES:
            for question in range(len(example.answers)):
                read, said = alone(example, question, processor)
                inputs = processor([example.pictures], [example.answers[question][0]])
                ids = torch.tensor([(read + said)[:-1]])
                logits, nothing = model(ids, inputs["images"])
                assert nothing is None
                likely = logits[0, len(read) - 1 :].log_softmax(-1)
                losses += [-likely[i, id].item() for i, id in enumerate(said)]
    assert abs(packed.item() - sum(losses) / len(losses)) < 1e-5


@pytest.mark.parametrize("pictures", [[], [noise(16, 16)]])
def test_an_example_without_an_answer_is_named(pictures, processor):
    with pytest.raises(ValueError, match=r"holiday/7\.png has no answer to learn"):
        encode(Example(pictures, [], name="holiday/7.png"), processor)


def test_a_batch_is_padded_where_nothing_is_seen_or_asked(processor):
    rows = [encode(example, processor) for example in EXAMPLES]
    batch = collate(rows, pad=7)
    T = batch["input_ids"].size(1)
    assert T % 8 == 0 and 0 <= T - max(len(row.ids) for row in rows) < 8  # few lengths, for a compiled step
    assert batch["input_ids"].shape == batch["targets"].shape == batch["attention_mask"].shape
    for b, row in enumerate(rows):
        n = len(row.ids)
        assert batch["input_ids"][b].tolist() == row.ids + [7] * (T - n)
        assert batch["targets"][b].tolist() == row.targets + [IGNORE_INDEX] * (T - n)
        assert batch["attention_mask"][b].tolist() == row.mask + [0] * (T - n)
    assert torch.equal(batch["images"], torch.cat([tile for row in rows for tile in row.images]))
    assert collate([rows[3]])["images"] is None


def test_padding_changes_no_loss(tiled):
    model, processor = tiled
    row = encode(EXAMPLES[0], processor)
    with torch.no_grad():
        _, loss = model(**collate([row]))
        padded = collate([row, encode(EXAMPLES[1], processor)])
        logits, _ = model(**padded)
        likely = logits[0].log_softmax(-1)
        asked = [(i, id) for i, id in enumerate(row.targets) if id != IGNORE_INDEX]
    assert abs(loss.item() - sum(-likely[i, id].item() for i, id in asked) / len(asked)) < 1e-5


TURNS = [("What is this?", "A red star."), ("Is it red?", "yes"), ("Where\nis it? <|im_end|>", "To the left.")]


@pytest.mark.parametrize("pictures", [[], [noise(16, 16)], [noise(30, 14, 2), noise(16, 16, 3)]])
def test_a_chain_reads_what_generation_would_read_of_all_turns_before(pictures, processor):
    row = encode(Example(pictures, TURNS, chain=True), processor)
    whole = [*row.ids, row.targets[-1]]
    assert set(row.mask) <= {1, 2} and row.mask == sorted(row.mask), "one branch, in which each sees all before it"
    grids = [processor.preprocess(picture)[1] for picture in pictures]
    expected = [IGNORE_INDEX] * len(row.ids)
    for k, (prompt, answer) in enumerate(TURNS):
        messages = [
            {"role": role, "content": text} for turn in TURNS[:k] for role, text in zip(("user", "assistant"), turn)
        ]
        messages.append({"role": "user", "content": prompt})
        messages[0]["images"] = processor.image_markup(grids)
        read = processor.tokenizer.encode_chat(messages)
        said = [*processor.tokenizer.encode(answer), processor.tokenizer.eos_token_id]
        assert whole[: len(read) + len(said)] == read + said
        expected[len(read) - 1 : len(read) + len(said) - 1] = said
    assert row.targets == expected


def test_a_chain_of_an_answer_that_the_chat_would_change_is_named(processor):
    cfg = replace(processor.cfg, lm_chat_template=CHATML.replace("['content']", "['content'].lower()"))
    shouting = Processor(cfg, Tokenizer(processor.tokenizer.backend, cfg))
    with pytest.raises(ExampleError, match=r"^7\.json\[1\]: in its turn 2 "):
        encode(Example([], [("a", "B"), ("c", "d")], "7.json[1]", chain=True), shouting)


def test_a_chain_of_one_turn_is_a_question(processor):
    alone, chained = (encode(Example([noise(16, 16)], TURNS[:1], chain=chain), processor) for chain in (False, True))
    assert (alone.ids, alone.targets, alone.mask) == (chained.ids, chained.targets, chained.mask)


@pytest.mark.parametrize(
    ("prompt", "answer", "words"),
    [
        ("What?", " \n", "empty answer to 'What?'"),
        ("What is <image>?", "x", "<image> in its question"),
        ("What?", "<|image|> is red", "<|image|> in its answer"),
        ("What?", "x " * 1100, "lm_max_position_embeddings=1024"),
    ],
)
def test_what_would_teach_something_else_is_refused(processor, prompt, answer, words):
    with pytest.raises(ExampleError) as error:
        encode_checked(Example([noise(16, 16)], [("Hi", "Ho"), (prompt, answer)], "a.png"), processor)
    assert str(error.value).startswith("a.png ") and words in str(error.value) and "\n" not in str(error.value)


def test_a_picture_that_cannot_be_opened_is_an_example_that_cannot(processor, tmp_path):
    (tmp_path / "a.png").write_bytes(b"hello")
    for picture, name in ((str(tmp_path / "a.png"), "7.json[1]"), (b"hello", "b.tar/1")):
        with pytest.raises(ExampleError, match=rf"^{re.escape(name)}: .*not a picture") as error:
            encode(Example([picture], ANSWERS, name), processor)
        assert isinstance(picture, bytes) or picture in str(error.value)
