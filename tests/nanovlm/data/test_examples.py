"""Training sees what generation reads and writes, and packing questions into one row changes no loss."""

import re
from dataclasses import replace

import pytest

from models.config import CHATML
from nanovlm.data.examples import IGNORE_INDEX, Example, ExampleError, collate, encode
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from support import noise_image

PAIRS = [("What is this?", "A red star."), ("How many stars are there? " * 3, "one"), ("?", "-"), ("Is it red?", "yes")]
EXAMPLES = {
    "one tile": Example([noise_image(16, 16)], PAIRS),
    "tiles": Example([noise_image(30, 48, 1)], PAIRS[1:]),
    "two images": Example([noise_image(30, 14, 2), noise_image(16, 16, 3)], PAIRS[:2]),
    "no image": Example([], PAIRS),
    "special tokens as text": Example([noise_image(16, 16, 4)], [("What is <|image|>?", "It is <|im_end|>, as text.")]),
}
TURNS = [("What is this?", "A red star."), ("Is it red?", "yes"), ("Where\nis it? <|im_end|>", "To the left.")]


@pytest.fixture(scope="module")
def processor(tiled):
    return tiled[1]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_continuation_equals_the_question_alone(example, processor):
    row = encode(example, processor)
    assert len(row.ids) == len(row.targets) == len(row.mask)
    assert sorted(row.mask) == row.mask, "the shared prefix, then one continuation after another"
    for question, (prompt, answer) in enumerate(example.qa_pairs):
        visible = [i for i, segment in enumerate(row.mask) if segment in (1, question + 2)]
        prompt_ids = processor([example.images], [prompt])["input_ids"][0].tolist()  # as generation reads it
        answer_ids = [*processor.tokenizer.encode(answer), processor.tokenizer.special_id("<|im_end|>")]
        assert [row.ids[i] for i in visible] == (prompt_ids + answer_ids)[:-1]
        assert [row.targets[i] for i in visible] == [IGNORE_INDEX] * (len(prompt_ids) - 1) + answer_ids


@pytest.mark.parametrize("images", [[], [noise_image(16, 16)]])
def test_example_without_an_answer_is_refused_by_name(images, processor):
    with pytest.raises(ExampleError, match=r"holiday/7\.png has no answer to learn"):
        encode(Example(images, [], name="holiday/7.png"), processor)


def test_length_is_not_rounded_up_beyond_the_limit(processor):
    row = encode(EXAMPLES["no image"], processor)
    n = len(row.ids)
    assert n % 8 and collate([row], max_length=n)["input_ids"].size(1) == n
    assert collate([row], max_length=n + 8)["input_ids"].size(1) % 8 == 0


@pytest.mark.parametrize("images", [[], [noise_image(16, 16)], [noise_image(30, 14, 2), noise_image(16, 16, 3)]])
def test_turn_reads_what_generation_reads_after_the_turns_before(images, processor):
    row = encode(Example(images, TURNS, multi_turn=True), processor)
    ids = [*row.ids, row.targets[-1]]
    assert set(row.mask) <= {1, 2} and row.mask == sorted(row.mask), "one continuation, causal within itself"
    grids = [processor.preprocess(image)[1] for image in images]
    targets = [IGNORE_INDEX] * len(row.ids)
    for k, (prompt, answer) in enumerate(TURNS):
        said = [text for turn in TURNS[:k] for text in turn] + [prompt]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        messages[0]["images"] = processor.layout.image_markups(grids)
        prompt_ids = processor.tokenizer.encode_chat(messages)
        answer_ids = [*processor.tokenizer.encode(answer), processor.tokenizer.eos_token_id]
        assert ids[: len(prompt_ids) + len(answer_ids)] == prompt_ids + answer_ids
        targets[len(prompt_ids) - 1 : len(prompt_ids) + len(answer_ids) - 1] = answer_ids
    assert row.targets == targets


def test_a_masked_answer_is_read_but_not_learned(processor):
    image, learned = noise_image(16, 16), (True, False, True)
    everything, masked = (encode(Example([image], TURNS, multi_turn=True, learned=m), processor) for m in ((), learned))
    assert masked.ids == everything.ids
    left = [target for target in masked.targets if target != IGNORE_INDEX]
    assert left == [i for k in (0, 2) for i in processor.tokenizer.encode_answer(TURNS[k][1])]
    alone = encode(Example([image], PAIRS[:1]), processor)
    assert encode(Example([image], PAIRS[:2], learned=(True, False)), processor).ids == alone.ids


def test_conversation_that_the_chat_template_changes_is_refused(processor):
    cfg = replace(processor.cfg, lm_chat_template=CHATML.replace("['content']", "['content'].lower()"))
    lowering = Processor(cfg, Tokenizer(processor.tokenizer.backend, cfg))
    with pytest.raises(ExampleError, match=r"^7\.json\[1\]: in turn 2 "):
        encode(Example([], [("a", "B"), ("c", "d")], "7.json[1]", multi_turn=True), lowering)


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        ("What?", " \n", "empty answer to 'What?'"),
        ("What?", "x " * 1100, "lm_max_position_embeddings=1024"),
    ],
)
def test_example_that_would_teach_something_else_is_refused(processor, prompt, answer, message):
    with pytest.raises(ExampleError) as error:
        encode(Example([noise_image(16, 16)], [("Hi", "Ho"), (prompt, answer)], "a.png"), processor)
    assert str(error.value).startswith("a.png ") and message in str(error.value) and "\n" not in str(error.value)


def test_unreadable_image_is_refused_with_the_name_of_the_example(processor, tmp_path):
    (tmp_path / "a.png").write_bytes(b"hello")
    for image, name in ((str(tmp_path / "a.png"), "7.json[1]"), (b"hello", "b.tar/1")):
        with pytest.raises(ExampleError, match=rf"^{re.escape(name)}: ") as error:
            encode(Example([image], PAIRS, name), processor)
        assert isinstance(image, bytes) or image in str(error.value)
