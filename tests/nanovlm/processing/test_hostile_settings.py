"""Every field of a SmolVLM folder's JSON files, set to values of other types and sizes: one short line or a caption."""

import json
import shutil

import pytest
from PIL import Image

from nanovlm import Captioner
from nanovlm.errors import CheckpointError, NanoVLMError
from support import Package
from support.smolvlm import write_folder

transformers = Package("transformers")
pytestmark = pytest.mark.full
FILES = ("config.json", "processor_config.json", "tokenizer_config.json", "generation_config.json")
ODD = ["a", 10**400, -1, 0, 1e400, float("nan"), True, None, [], {}, [True], "x" * 10**6, 1.5, {"a": 1}]


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "model")
    return tmp_path / "model"


def odd_settings(settings):
    """The settings with each value of nested dictionaries replaced by odd ones, one at a time."""
    for key, value in settings.items():
        for odd in (*ODD, *(odd_settings(value) if isinstance(value, dict) else ())):
            yield settings | {key: odd}


@pytest.mark.parametrize("file", FILES)
def test_an_odd_value_is_one_short_line_or_without_effect(folder, file):
    settings, refused = json.loads((folder / file).read_text()), 0
    for changed in odd_settings(settings):
        (folder / file).write_text(json.dumps(changed))
        try:
            captioner = Captioner.from_pretrained(folder, "cpu", "float32")
            captioner.caption(Image.new("RGB", (20, 30)), max_new_tokens=2)
        except NanoVLMError as error:
            refused += 1
            assert len(str(error)) < 1000 and "\n" not in str(error), changed
    assert refused > 10 or file == "tokenizer_config.json"


REFUSED = {  # words of the error -> file, section, and the setting changed there
    "scale_factor='a'": ("config.json", None, {"scale_factor": "a"}),
    "model_type='llava' is none of idefics3": ("config.json", None, {"model_type": "llava"}),
    "the image token is .*, but config.json has image_token_id=7": ("config.json", None, {"image_token_id": 7}),
    "text_config: qk_layer_norms=": ("config.json", "text_config", {"qk_layer_norms": True}),
    "text_config: model_type=": ("config.json", "text_config", {"model_type": "mistral"}),
    "text_config: rope_scaling=": ("config.json", "text_config", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}),
    "vision_config: hidden_act=": ("config.json", "vision_config", {"hidden_act": "gelu"}),
    "image_seq_len=5, but a tile has 4 embeddings": ("processor_config.json", None, {"image_seq_len": 5}),
    "longest_edge": ("processor_config.json", "image_processor", {"size": {"longest_edge": 10**400}}),
    "do_center_crop=True is not supported": ("processor_config.json", "image_processor", {"do_center_crop": True}),
    "fake_image_token='xxx": ("tokenizer_config.json", None, {"fake_image_token": "x" * 10**7}),
    "eos_token_id": ("generation_config.json", None, {"eos_token_id": 10**400}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_computes_something_else_or_disagrees_is_named_in_the_words_of_the_file(folder, words):
    file, section, change = REFUSED[words]
    settings = json.loads((folder / file).read_text())
    (settings[section] if section else settings).update(change)
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=words):
        Captioner.from_pretrained(folder, "cpu", "float32")


def test_which_of_two_files_counts(folder, monkeypatch):
    """processor_config.json comes first, as in transformers 5; the tokenizer is that of the folder alone."""
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"do_image_splitting": False}))
    assert Captioner.from_pretrained(folder, "cpu").processor.max_tiles_per_image > 1
    monkeypatch.chdir(folder)
    shutil.copytree(folder, "inner")
    (folder / "inner/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"inner has no tokenizer\.json"):
        Captioner.from_pretrained("inner")
