"""Keywords of the Captioner's methods: sampling fields and start_with."""

import re

import numpy as np
import pytest
import torch

from models.decoding import SamplingParams
from nanovlm import SAMPLE, Captioner, ChatSession
from nanovlm.errors import InputError
from nanovlm.options import GenerationOptions, ModelOptions
from nanovlm.processing.image_loading import load_image

PROMPT = "What is this?"


def test_fields_of_sampling_are_keywords(random_captioner):
    warm = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=3)
    fields = {name: getattr(warm, name) for name in SamplingParams.__dataclass_fields__}
    expected = random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=12, sampling=warm)
    assert expected == random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=12, **fields)
    assert expected == "".join(random_captioner.stream(SAMPLE, PROMPT, max_new_tokens=12, **fields))
    assert [expected] == random_captioner.ask(SAMPLE, [PROMPT], max_new_tokens=12, **fields)
    assert [expected] == list(random_captioner.captions([SAMPLE], PROMPT, max_new_tokens=12, **fields))
    fields |= {"temperature": np.float32(1.5), "seed": np.int64(3), "repetition_detection": (np.int64(0),) * 3}
    assert expected == random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=np.int64(12), **fields)
    assert expected != random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=12)
    whole = GenerationOptions(max_new_tokens=12, **fields | {"seed": 4})
    assert expected == random_captioner.caption(SAMPLE, PROMPT, options=whole, seed=3)
    assert expected == "".join(ChatSession(random_captioner, [SAMPLE]).ask(PROMPT, options=whole, seed=3))


def test_wrong_keywords_are_named(embedded):
    with pytest.raises(TypeError, match="'temprature'; GenerationOptions takes .*temperature, .*max_new_tokens"):
        embedded.caption(SAMPLE, temprature=0.5)
    wrong = [
        ("temperature", -1, "a finite number of at least 0"),
        ("start_with", 3, "a text"),
        ("max_new_tokens", 0, "at least 1"),
    ]
    wrong += [("max_new_tokens", None, "a whole number"), ("repetition_detection", None, "three whole numbers")]
    for name, value, limits in wrong:
        with pytest.raises(InputError, match=re.escape(f"{name}={value} must be {limits}")):
            embedded.caption(SAMPLE, **{name: value})
    for name in ("adapter", "model"):
        with pytest.raises(InputError, match=f"{name}=3 must be a folder with"):
            Captioner.from_pretrained(**{name: 3})
    with pytest.raises(InputError, match="allow_urls='no' must be True or False"):
        Captioner.from_pretrained(allow_urls="no")
    with pytest.raises(InputError, match="start_with is for captions"):
        next(ChatSession(embedded).ask("?", start_with="A"))
    with pytest.raises(TypeError, match="'max_tile'; ModelOptions takes model, .*max_tiles"):
        Captioner.from_pretrained(max_tile=3)
    with pytest.raises(InputError, match="quantize=int2 is none of int8, int4"):
        Captioner.from_pretrained(quantize="int2")
    for threads, limits in ((0, "at least 1 and at most 1024"), ("two", "a whole number")):
        with pytest.raises(InputError, match=f"threads={threads} must be {limits}"):
            ModelOptions(threads=threads)


def test_an_answer_that_starts_with_its_own_beginning_is_the_same(embedded):
    text = embedded.caption(SAMPLE)
    for words in range(1, 8):
        start = " ".join(text.split()[:words])
        for given in (start, f"{start} "):  # a space at the end belongs to the next word
            assert embedded.caption(SAMPLE, start_with=given) == text
            assert "".join(embedded.stream(SAMPLE, start_with=given)) == text
    questions = [PROMPT, "What is in this picture?"]
    alone = [embedded.caption(SAMPLE, question, start_with="A small") for question in questions]
    assert embedded.ask(SAMPLE, questions, start_with="A small") == alone
    assert list(embedded.captions([SAMPLE] * 2, questions, start_with="A small")) == alone
    assert all(answer.startswith("A small ") for answer in alone) and not text.startswith("A small")


def test_the_model_continues_the_start(random_captioner):
    """The same ids as `generate` gives for the prompt's and the start's ids in one row."""
    start = "A photo of two"
    row, tiles = random_captioner.processor.encode([load_image(SAMPLE)], PROMPT)
    start_ids = random_captioner.tokenizer.encode(start)
    prompt_ids = torch.tensor([row + start_ids])
    (ids,) = random_captioner.model.generate(prompt_ids, torch.cat(tiles), max_new_tokens=9).tolist()
    eos = random_captioner.tokenizer.eos_token_id
    ids = ids[: ids.index(eos)] if eos in ids else ids
    expected = random_captioner.tokenizer.decode(start_ids + ids)
    assert random_captioner.caption(SAMPLE, PROMPT, start_with=start, max_new_tokens=9) == expected
    assert expected.startswith(start) and len(expected) > len(start)
