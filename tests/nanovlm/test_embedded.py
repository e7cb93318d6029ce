"""The embedded model: its size, its accuracy on fresh scenes, and its training recipe."""

import math
import os
import re
from random import Random

import pytest
import torch
from huggingface_hub import metadata_load
from PIL import Image, ImageChops

from eval.captions import measure
from eval.lib.scenes import SPLITS, make_splits
from nanovlm import EMBEDDED, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.data.examples import encode
from nanovlm.embedded import PROMPT, default_prompt
from nanovlm.errors import CheckpointError
from nanovlm.synthetic import caption, draw, random_scene, recipe
from nanovlm.synthetic.captions import short_caption
from nanovlm.synthetic.recipe import CAPTION_PROMPTS, SHORT_PROMPTS, scene_example
from nanovlm.synthetic.scene import SHAPES, SIZES, with_unnamed_colors


def test_the_model_fits_in_ten_megabytes_and_its_card_lists_the_prompts_of_the_recipe():
    files = {path.name: path for path in EMBEDDED.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "tokenizer.json", "sample.png", "README.md", "run.json"}
    assert sum(path.stat().st_size for path in files.values()) <= 10e6
    assert metadata_load(EMBEDDED / "README.md")["trained_prompts"] == [*CAPTION_PROMPTS, *SHORT_PROMPTS]


def test_the_recipe_starts_the_embedded_model_with_new_weights(embedded):
    model, again, other = (recipe.make_model(seed)[0] for seed in (0, 0, 1))
    assert model.cfg == embedded.model.cfg
    weights = [one.decoder.token_embedding.weight for one in (model, again, other, embedded.model)]
    assert torch.equal(*weights[:2]) and not any(torch.equal(weights[0], one) for one in weights[2:])
    words = [*recipe.COLORS, *SHAPES, *SIZES]
    assert all(len(embedded.tokenizer.encode(f" {word}")) == 1 for word in words), "each is a token"


def test_unnamed_colors_are_never_trained_as_words(embedded):
    """No shape has nearly a named color, and no color's name is an input or a target; shapes and positions are."""
    rng = Random("unnamed")
    names, words = recipe.color_token_ids(embedded.tokenizer), set(recipe.COLORS)
    for _ in range(30):
        scene = with_unnamed_colors(random_scene(rng), rng)
        assert all(math.dist(t.rgb, c) >= 50 for t in scene.shapes for c in recipe.COLORS.values())
        example = scene_example(scene, rng, 5, (96, 96), colorless=True)
        texts = [f"{question.text} {answer.text}" for question, answer in example.chats[1:]]
        assert all(words.isdisjoint(re.findall(r"\w+", text)) for text in texts)
        row = encode(example, embedded.processor)
        masked = recipe.mask_tokens(row, names)
        assert names & set(row.targets) and not names & (set(masked.ids) | set(masked.targets))
        changed = [i for i, (a, b) in enumerate(zip(row.targets, masked.targets)) if a != b]
        assert changed == [i for i, a in enumerate(row.targets) if a in names]
        assert embedded.tokenizer.encode(f" {scene.shapes[0].kind}")[0] in masked.targets


def test_sample_is_a_drawn_scene_with_the_right_caption(embedded):
    scene = random_scene(Random("sample 21"))
    with Image.open(SAMPLE) as sample:
        assert ImageChops.difference(sample, draw(scene, *sample.size)).getbbox() is None
    for prompt in CAPTION_PROMPTS:
        assert embedded.caption(SAMPLE, prompt) == caption(scene)
    for prompt in SHORT_PROMPTS:
        assert embedded.caption(SAMPLE, prompt) == short_caption(scene)


def test_4_to_3_scenes_are_captioned_right():
    scenes = [random_scene(Random(f"test {i}"), withheld=i % 2 == 1) for i in range(100)]
    answers = Captioner.from_pretrained().captions([draw(scene, 160, 120) for scene in scenes])
    assert sum(text == caption(scene) for text, scene in zip(answers, scenes)) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thousand_fresh_scenes_reach_the_required_shares(dtype):
    result, _ = measure(Captioner.from_pretrained(dtype=dtype), make_splits(1000, seed="eval slow"))
    shares = {name: result[name]["right"] / result[name]["of"] for name in SPLITS}
    assert shares["captions"] >= 0.96 and shares["withheld"] >= 0.90 and shares["questions"] >= 0.95, shares
    rows = {row: counts["right"] / counts["of"] for row, counts in result["relations"]["rows"].items()}
    assert len(rows) == 3 and min(rows.values()) >= 0.97, rows


def test_settings_that_are_no_file_or_no_object_are_one_line_and_without_a_prompt_it_is_the_usual_one(tmp_path):
    path = tmp_path / "nanovlm.json"
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        put(path)
        with pytest.raises(CheckpointError, match=r"nanovlm\.json is a pipe"):
            default_prompt(tmp_path)
        path.unlink()
    for text in ("[" * 200_000, '{"prompt":' * 100_000, "no JSON", '["prompt"]', "", '{"a": "\\ud800"}'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"^[^\n]*nanovlm\.json [^\n]*$"):
            default_prompt(tmp_path)
    for text in ("{}", '{"prompt": " "}', '{"prompt": 5}'):
        path.write_text(text)
        assert default_prompt(tmp_path) == PROMPT
    path.unlink()
    assert default_prompt(tmp_path) == PROMPT
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"nanovlm\.json is a folder"):
        default_prompt(tmp_path)
