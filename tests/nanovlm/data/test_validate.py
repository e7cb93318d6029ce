"""`train --check-data` counts what can be used, names what cannot, and shows examples as the model sees them."""

import pytest

from nanovlm.data import Source, Subset
from nanovlm.data.examples import Example
from nanovlm.data.validate import check_data
from support import noise_image

PAIRS = [("What is this?", "A red star."), ("Is it red?", "yes")]
RECORDS = {
    "questions": Example([noise_image(16, 16)], PAIRS),
    "conversation": Example([], PAIRS, multi_turn=True),
    "empty": Example([], [("What?", " ")]),
}


def make_example(record, name):
    return Example(record.images, record.qa_pairs, name, record.multi_turn)


def source(*names, **options):
    return Source("data", [RECORDS[name] for name in names], make_example, names, named_by_key=True, **options)


@pytest.fixture
def processor(tiled):
    return tiled[1]


def test_usable_examples_are_counted_and_shown(processor, capsys):
    examples = source("questions", "conversation")
    train, held_out = (Subset(examples, indices) for indices in ([0], [1]))
    assert check_data([train], [held_out], processor, skip_errors=False) == 0
    out = capsys.readouterr().out
    answer_tokens = sum(len(processor.tokenizer.encode(answer)) + 1 for _, answer in PAIRS)
    assert out.startswith(f"data: 1 example, 1 image, {answer_tokens} answer tokens; the longest takes ")
    assert f"\ndata, held out: 1 example, 0 images, {answer_tokens} answer tokens; " in out
    questions, conversation = out.split("\n--- ")[1:]
    first = "What is this?<|im_end|>\n<|im_start|>assistant\n[[A red star.<|im_end|>]]\n"
    second = "Is it red?<|im_end|>\n<|im_start|>assistant\n[[yes<|im_end|>]]\n"
    assert questions.startswith("data/questions\n(image 1: 1 tile of 16 x 16)\n")
    assert questions.endswith(f"{first}... {second}"), "two continuations of one prefix"
    assert conversation == f"data/conversation\n<|im_start|>user\n{first}<|im_start|>user\n{second}"


@pytest.mark.parametrize(("skip_errors", "exit_code"), [(False, 1), (True, 0)])
def test_unusable_examples_are_named(processor, capsys, skip_errors, exit_code):
    subset = Subset(source("questions", "empty"), range(2))
    assert check_data([subset], [], processor, skip_errors) == exit_code
    out = capsys.readouterr().out
    assert "\ndata: 1 example," in f"\n{out}" and "  data/empty has an empty answer to 'What?';" in out
    assert ("1 cannot be used and will be skipped:" in out) == skip_errors


def test_endless_source_is_checked_in_part(processor, capsys):
    endless = Source("drawn", range(10**6), lambda record, name: Example([], PAIRS, name), endless=True)
    assert check_data([Subset(endless, range(10**6))], [], processor, skip_errors=False) == 0
    assert capsys.readouterr().out.startswith("drawn: the first 1,000 examples, 0 images, ")
