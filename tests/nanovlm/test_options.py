"""Records of options: fields as keywords, their checks, a model's own defaults, and start_with."""

import json
import pickle
import re
import shutil

import numpy as np
import pytest
import torch

from models.common.options import SamplingParams
from nanovlm import SAMPLE, Captioner, ChatSession, GenerationOptions
from nanovlm.errors import CheckpointError, InputError, MissingExtraError, needs_extra
from nanovlm.options import ModelOptions, generation_options, read_generation_defaults
from nanovlm.processing.image_loading import load_image
from support.generation import prompt_of

PROMPT = "What is this?"


def test_fields_of_sampling_are_keywords(random_captioner):
    warm = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=3)
    fields = vars(warm)
    expected = random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=12, sampling=warm)
    assert expected == random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=12, **fields)
    fields |= {"temperature": np.float32(1.5), "seed": np.int64(3), "repetition_detection": (np.int64(0),) * 3}
    assert expected == random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=np.int64(12), **fields)
    assert expected != random_captioner.caption(SAMPLE, PROMPT, max_new_tokens=12)
    whole = GenerationOptions(max_new_tokens=12, **fields | {"seed": 4})
    assert expected == random_captioner.caption(SAMPLE, PROMPT, options=whole, seed=3)
    assert expected == "".join(ChatSession(random_captioner, [SAMPLE]).ask(PROMPT, options=whole, seed=3))


REFUSED = {  # words of the error -> a record, and a field with a wrong value
    "temperature=-1 must be 0 (greedy), or a number from 1e-30 to 1e30": (GenerationOptions, {"temperature": -1}),
    "start_with=3 must be a text": (GenerationOptions, {"start_with": 3}),
    "max_new_tokens=0 must be at least 1": (GenerationOptions, {"max_new_tokens": 0}),
    "max_new_tokens=None must be a whole number": (GenerationOptions, {"max_new_tokens": None}),
    "repetition_detection=None must be three whole numbers": (GenerationOptions, {"repetition_detection": None}),
    "schema excludes start_with": (GenerationOptions, {"schema": {}, "start_with": "A"}),
    "adapter=3 must be a folder with adapter_config.json": (ModelOptions, {"adapter": 3}),
    "adapter=/ must be a folder with": (ModelOptions, {"adapter": "/"}),
    "model=3 must be a folder with": (ModelOptions, {"model": 3}),
    "(LoRA adapters: --adapter)": (ModelOptions, {"model": "/"}),
    "allow_urls='no' must be True or False": (ModelOptions, {"allow_urls": "no"}),
    "quantize=int2 is none of int8, int4": (ModelOptions, {"quantize": "int2"}),
    "device=tpu is none of auto": (ModelOptions, {"device": "tpu"}),
    "dtype=int8 is none of auto, float32, bfloat16, float16": (ModelOptions, {"dtype": "int8"}),
    "threads=0 must be at least 1 and at most 1024": (ModelOptions, {"threads": 0}),
    "threads=two must be a whole number": (ModelOptions, {"threads": "two"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_values_are_named(words):
    record, fields = REFUSED[words]
    with pytest.raises(InputError, match=re.escape(words)):
        record(**fields)


def test_wrong_keywords_are_named(embedded):
    with pytest.raises(TypeError, match="GenerationOptions.* unexpected keyword argument 'temprature'"):
        embedded.caption(SAMPLE, temprature=0.5)
    with pytest.raises(TypeError, match="ModelOptions.* unexpected keyword argument 'max_tile'"):
        Captioner.from_pretrained(max_tile=3)


def test_an_answer_that_starts_with_its_own_beginning_is_the_same(embedded):
    text = embedded.caption(SAMPLE)
    for words in range(1, 8):
        start = " ".join(text.split()[:words])
        for given in (start, f"{start} "):  # a space at the end belongs to the next word
            assert embedded.caption(SAMPLE, start_with=given) == text


def test_the_model_continues_the_start(random_captioner):
    """The ids are those that `generate` gives for the prompt's and the start's ids in one row."""
    start, eos = "A photo of two", random_captioner.tokenizer.eos_token_id
    row, tiles = prompt_of(random_captioner.processor, [load_image(SAMPLE)], PROMPT)
    start_ids = random_captioner.tokenizer.encode(start)
    prompt_ids = torch.tensor([row + start_ids])
    (ids,) = random_captioner.model.generate(prompt_ids, torch.cat(tiles), max_new_tokens=9).tolist()
    ids = ids[: ids.index(eos)] if eos in ids else ids
    expected = random_captioner.tokenizer.decode(start_ids + ids)
    assert random_captioner.caption(SAMPLE, PROMPT, start_with=start, max_new_tokens=9) == expected
    assert expected.startswith(start) and len(expected) > len(start)


# ------------------------------------------------------------------------------------------- generation_config.json

SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
OFF = {
    "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": None, "bad_words_ids": [], "typical_p": 1.0,
    "do_sample": False, "renormalize_logits": False, "max_length": None,
}  # fmt: skip


STORED = [  # generation_config.json, the defaults that it gives, and what is said of the rest
    (None, {}, ""),
    ({"_from_model_config": True, "eos_token_id": [1, 2], "pad_token_id": 2, "transformers_version": "5"}, {}, ""),
    ({"repetition_penalty": 1.2, "max_new_tokens": 9}, {"repetition_penalty": 1.2, "max_new_tokens": 9}, ""),
    ({"temperature": 0.6, "top_p": 0.9, "top_k": None}, {}, ""),  # transformers is greedy without do_sample
    ({"do_sample": True, "temperature": 0.6, "top_p": None}, SAMPLED | {"temperature": 0.6}, ""),
    (OFF, {}, ""),
    ({"num_beams": 4, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, "num_beams=4"),
    ({"no_repeat_ngram_size": 3, "suppress_tokens": [5]}, {}, "no_repeat_ngram_size=3, suppress_tokens=[5]"),
    ({"bad_words_ids": [[7]], "renormalize_logits": True}, {}, "bad_words_ids=[[7]], renormalize_logits=true"),
    ({"max_length": 2048, "min_new_tokens": 1}, {}, "max_length=2048, min_new_tokens=1"),
    ({"repetition_penalty": 0}, CheckpointError, "generation_config.json: repetition_penalty=0"),
    ({"max_new_tokens": "many"}, CheckpointError, "max_new_tokens=many must be a whole number"),
]


@pytest.mark.parametrize(("raw", "defaults", "said"), STORED)
def test_what_is_computed_is_the_default_and_the_rest_is_said(tmp_path, caplog, raw, defaults, said):
    if raw is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    if defaults is CheckpointError:
        with pytest.raises(CheckpointError, match=re.escape(said)):
            read_generation_defaults(tmp_path)
        return
    assert read_generation_defaults(tmp_path) == defaults
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(said) and all(f": {said}: not supported" in message for message in messages)


def test_every_door_has_the_models_defaults_and_what_is_given_wins(
    model_folder, random_captioner, generate, capsys, tmp_path
):
    folder = shutil.copytree(model_folder, tmp_path / "penalized")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 3.0, "max_new_tokens": 12, "num_beams": 2}')
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    alone = lambda penalty: random_captioner.caption(SAMPLE, repetition_penalty=penalty, max_new_tokens=12)  # noqa: E731
    expected = {penalty: alone(penalty) for penalty in (1, 3)}
    assert expected[1] != expected[3] == captioner.caption(SAMPLE)
    assert captioner.caption(SAMPLE, repetition_penalty=1) == expected[1]
    assert captioner.caption(SAMPLE, options=GenerationOptions(repetition_penalty=1.0)) == expected[1]
    assert list(captioner.captions([SAMPLE], options=GenerationOptions(temperature=0))) == [expected[3]]
    chats = (captioner, {"repetition_penalty": 1}), (random_captioner, {"max_new_tokens": 12})
    assert len({"".join(ChatSession(one, SAMPLE).ask("?", **options)) for one, options in chats}) == 1
    capsys.readouterr()  # of loading the model above, where a program has set up logging
    for flags, penalty in (((), 3), (("--repetition-penalty", "1"), 1)):
        code, out, err = generate("--max-new-tokens", "12", str(SAMPLE), *flags, model=folder)
        assert code == 0 and out.strip() == " ".join(expected[penalty].splitlines()) and err.count("num_beams=2") == 1


def test_options_know_what_was_given():
    options = pickle.loads(pickle.dumps(GenerationOptions(top_k=0)))
    assert options.given == {"top_k"} and options == GenerationOptions()
    filled = generation_options(options, {"seed": 3}, {"top_k": 50, "top_p": 0.5, "seed": 1})
    assert (filled.top_k, filled.top_p, filled.seed) == (0, 0.5, 3)
    assert generation_options(filled, {}, {"temperature": 1.0}) == filled


def test_an_extra_that_is_missing_or_broken_is_named_but_a_module_of_ours_is_a_bug():
    library = "libgomp.so.1: cannot open shared object file"
    for error, words in (
        (ModuleNotFoundError("No module named 'ray.data'", name="ray.data"), "x: ray is missing; pip install"),
        (ImportError(library), f"x: {library}"),
    ):
        with pytest.raises(MissingExtraError, match=words), needs_extra("ray", "x"):
            raise error
    with pytest.raises(ModuleNotFoundError) as raised, needs_extra("ray", "x"):
        import nanovlm.nothing  # noqa: F401
    assert not isinstance(raised.value, MissingExtraError)
