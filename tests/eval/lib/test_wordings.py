"""Wordings: which of them training uses, and what counts as right."""

from random import Random

import pytest

from eval.lib.wordings import (
    CAPTION_WORDINGS,
    COUNT_WORDINGS,
    expected_answer,
    measure_wordings,
    shortened,
    simplified,
    trained_wordings,
)
from nanovlm.cli.caption import LENGTHS
from nanovlm.synthetic import caption, random_scene
from nanovlm.synthetic.captions import NUMBERS
from nanovlm.synthetic.recipe import CAPTION_PROMPTS


@pytest.fixture(scope="module")
def trained():
    return trained_wordings()


def test_every_prompt_of_the_recipe_and_of_the_command_line_is_asked():
    assert {*CAPTION_PROMPTS, *(prompt for prompt, _ in LENGTHS.values())} <= {*CAPTION_WORDINGS}
    wordings = [simplified(wording) for wording in (*CAPTION_WORDINGS, *COUNT_WORDINGS)]
    assert len(set(wordings)) == len(wordings), "a wording occurs twice"


def test_what_training_asks_is_told_from_what_it_does_not(trained):
    assert {simplified(prompt) for prompt in CAPTION_PROMPTS} <= trained
    assert simplified("How many objects are there?") in trained
    assert simplified("Describe everything in the picture.") not in trained
    held_out = [wording for wording in (*CAPTION_WORDINGS, *COUNT_WORDINGS) if simplified(wording) not in trained]
    assert len(held_out) >= 5
    assert trained_wordings(100) <= trained, "samples are drawn in the same order"


def test_every_wording_has_the_answer_of_its_kind():
    scene = random_scene(Random(3))
    for wording in COUNT_WORDINGS:
        assert expected_answer(wording, scene) == NUMBERS[len(scene.shapes)]
    assert expected_answer("describe", scene) == expected_answer(CAPTION_PROMPTS[0], scene) == caption(scene)


def test_a_short_caption_names_colors_and_shapes_only():
    text = "A small orange ring, a large red star and a small orange heart on a plain background."
    assert shortened(text) == "An orange ring, a red star and an orange heart."
    assert shortened("A large blue ring on a wavy background.") == "A blue ring."


def test_every_wording_is_asked_about_the_same_scenes():
    seen = {}

    class Teller:
        def captions(self, images, prompt, batch_size):
            seen[prompt] = images
            return iter(["three"] * len(images))

    results = measure_wordings(Teller(), 12, "test", 4)
    assert list(results) == list(seen) == [*CAPTION_WORDINGS, *COUNT_WORDINGS]
    assert all(images is seen["Describe"] for images in seen.values()) and len(seen["Describe"]) == 12
    counts = {results[wording]["right"] for wording in COUNT_WORDINGS}
    assert len(counts) == 1 and 0 < counts.pop() < 12
    assert all(results[wording]["right"] == 0 and results[wording]["of"] == 12 for wording in CAPTION_WORDINGS)
    assert results[CAPTION_PROMPTS[0]]["trained"] and not results["Describe everything in the picture."]["trained"]
