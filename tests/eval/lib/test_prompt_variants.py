"""Prompt variants: which of them training uses, and what counts as right."""

from random import Random

import pytest

from eval.lib.prompt_variants import (
    CAPTION_VARIANTS,
    COUNT_VARIANTS,
    expected_answer,
    measure_prompt_variants,
    shortened,
    simplified,
    trained_prompts,
)
from nanovlm.cli.caption import LENGTHS
from nanovlm.synthetic import caption, random_scene
from nanovlm.synthetic.captions import NUMBERS
from nanovlm.synthetic.recipe import CAPTION_PROMPTS


def test_every_prompt_of_the_recipe_and_of_the_command_line_is_asked():
    assert {*CAPTION_PROMPTS, *(prompt for prompt, _ in LENGTHS.values())} <= {*CAPTION_VARIANTS}
    variants = [simplified(variant) for variant in (*CAPTION_VARIANTS, *COUNT_VARIANTS)]
    assert len(set(variants)) == len(variants), "a variant occurs twice"


def test_what_training_asks_is_told_from_what_it_does_not():
    trained = trained_prompts(300)
    assert {simplified(prompt) for prompt in CAPTION_PROMPTS} <= trained
    assert simplified("How many objects are there?") in trained
    assert simplified("Describe everything in the picture.") not in trained
    held_out = [variant for variant in (*CAPTION_VARIANTS, *COUNT_VARIANTS) if simplified(variant) not in trained]
    assert len(held_out) >= 5
    assert trained_prompts(100) <= trained, "samples are drawn in the same order"


def test_every_variant_has_the_answer_of_its_kind():
    scene = random_scene(Random(3))
    for variant in COUNT_VARIANTS:
        assert expected_answer(variant, scene) == NUMBERS[len(scene.shapes)]
    assert expected_answer("describe", scene) == expected_answer(CAPTION_PROMPTS[0], scene) == caption(scene)


def test_a_short_caption_names_colors_and_shapes_only():
    text = "A small orange ring, a large red star and a small orange heart on a plain background."
    assert shortened(text) == "An orange ring, a red star and an orange heart."
    assert shortened("A large blue ring on a wavy background.") == "A blue ring."


@pytest.mark.full
def test_every_variant_is_asked_about_the_same_scenes():
    seen = {}

    class Teller:
        def captions(self, images, prompt, batch_size):
            seen[prompt] = images
            return iter(["three"] * len(images))

    results = measure_prompt_variants(Teller(), 12, "test", 4)
    assert list(results) == list(seen) == [*CAPTION_VARIANTS, *COUNT_VARIANTS]
    assert all(images is seen["Describe"] for images in seen.values()) and len(seen["Describe"]) == 12
    counts = {results[variant]["right"] for variant in COUNT_VARIANTS}
    assert len(counts) == 1 and 0 < counts.pop() < 12
    assert all(results[variant]["right"] == 0 and results[variant]["of"] == 12 for variant in CAPTION_VARIANTS)
    assert results[CAPTION_PROMPTS[0]]["trained"] and not results["Describe everything in the picture."]["trained"]
