"""generation_config.json: what is computed becomes the default, the rest is said in one line."""

import json
import pickle
import shutil

import pytest

from nanovlm import SAMPLE, Captioner, ChatSession, GenerationOptions
from nanovlm.errors import CheckpointError
from nanovlm.generation_config import read_generation_defaults
from nanovlm.options import generation_options

SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize(
    ("raw", "defaults", "said"),
    [
        (None, {}, ""),
        ({"_from_model_config": True, "eos_token_id": [1, 2], "pad_token_id": 2, "transformers_version": "5"}, {}, ""),
        ({"repetition_penalty": 1.2, "max_new_tokens": 9}, {"repetition_penalty": 1.2, "max_new_tokens": 9}, ""),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": None}, {}, ""),  # transformers is greedy without do_sample
        ({"do_sample": True, "temperature": 0.6, "top_p": None}, SAMPLED | {"temperature": 0.6}, ""),
        (
            {
                "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": None, "bad_words_ids": [],
                "typical_p": 1.0, "do_sample": False, "renormalize_logits": False, "max_length": None,
            },
            {},
            "",
        ),
        ({"num_beams": 4, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, "num_beams=4"),
        ({"no_repeat_ngram_size": 3, "suppress_tokens": [5]}, {}, "no_repeat_ngram_size=3, suppress_tokens=[5]"),
        ({"bad_words_ids": [[7]], "renormalize_logits": True}, {}, "bad_words_ids=[[7]], renormalize_logits=true"),
        ({"max_length": 2048, "min_new_tokens": 1}, {}, "max_length=2048, min_new_tokens=1"),
        ({"repetition_penalty": 0}, CheckpointError, "generation_config.json: repetition_penalty=0"),
        ({"max_new_tokens": "many"}, CheckpointError, "max_new_tokens=many must be a whole number"),
    ],
)  # fmt: skip
def test_what_is_computed_is_the_default_and_the_rest_is_said(tmp_path, caplog, raw, defaults, said):
    if raw is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    if defaults is CheckpointError:
        with pytest.raises(CheckpointError) as error:
            read_generation_defaults(tmp_path)
        assert said in str(error.value)
        return
    assert read_generation_defaults(tmp_path) == defaults
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(said) and all(f": {said}: not supported" in message for message in messages)


@pytest.fixture(scope="module")
def penalized(model_folder, tmp_path_factory):
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("models") / "penalized")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 3.0, "max_new_tokens": 12, "num_beams": 2}')
    return folder


def test_every_door_has_the_models_defaults_and_what_is_given_wins(penalized, random_captioner, generate, capsys):
    captioner = Captioner.from_pretrained(penalized, "cpu", "float32")
    expected = {
        penalty: random_captioner.caption(SAMPLE, repetition_penalty=penalty, max_new_tokens=12) for penalty in (1, 3)
    }
    assert expected[1] != expected[3] == captioner.caption(SAMPLE)
    assert captioner.caption(SAMPLE, repetition_penalty=1) == expected[1]
    assert captioner.caption(SAMPLE, options=GenerationOptions(repetition_penalty=1.0)) == expected[1]
    assert list(captioner.captions([SAMPLE], options=GenerationOptions(temperature=0))) == [expected[3]]
    assert "".join(ChatSession(captioner, SAMPLE).ask("?", repetition_penalty=1)) == "".join(
        ChatSession(random_captioner, SAMPLE).ask("?", max_new_tokens=12)
    )
    capsys.readouterr()  # of loading the model above, where a program has set up logging
    for flags, penalty in (((), 3), (("--repetition-penalty", "1"), 1)):
        code, out, err = generate("--max-new-tokens", "12", str(SAMPLE), *flags, model=penalized)
        assert code == 0 and out.strip() == " ".join(expected[penalty].splitlines()) and err.count("num_beams=2") == 1
        code, out, _ = generate("--max-new-tokens", "12", "--json", str(SAMPLE), *flags, model=penalized)
        assert code == 0 and json.loads(out)["text"] == expected[penalty].strip()


def test_options_know_what_was_given():
    options = pickle.loads(pickle.dumps(GenerationOptions(top_k=0)))
    assert options.given == {"top_k"} and options == GenerationOptions()
    filled = generation_options(options, {"seed": 3}, {"top_k": 50, "top_p": 0.5, "seed": 1})
    assert (filled.top_k, filled.top_p, filled.seed) == (0, 0.5, 3)
    assert generation_options(filled, {}, {"temperature": 1.0}) == filled
