"""The model that ships: small, true on fresh scenes, and made by the recipe beside it."""

import math
import re
from functools import partial
from random import Random

import pytest
import torch
from PIL import Image, ImageChops

from eval.captions import measure
from nanovlm import EMBEDDED, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.data.examples import encode
from nanovlm.synthetic import caption, draw, random_scene, recipe
from nanovlm.synthetic.recipe import CAPTION_PROMPTS, drop_words, make_config, make_tokenizer, scene_example
from nanovlm.synthetic.scene import with_unnamed_colors


@pytest.fixture(scope="module")
def captioner():
    return Captioner.from_pretrained(dtype="float32")


def test_it_fits_in_ten_megabytes_with_its_card():
    files = {path.name: path for path in EMBEDDED.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "tokenizer.json", "sample.png", "README.md"}
    assert sum(path.stat().st_size for path in files.values()) <= 10e6


def test_its_config_and_tokenizer_are_the_recipes(captioner):
    tokenizer = make_tokenizer()
    assert captioner.model.cfg == make_config(tokenizer)
    assert captioner.tokenizer.backend.get_vocab() == tokenizer.get_vocab()


def test_forgetting_hides_words_that_an_answer_has_said_and_nothing_else(captioner):
    """Not the prompt, not the first word of an answer, not what is asked for; about a fifth of the rest."""
    rng = Random("forget")
    rows = [encode(scene_example(random_scene(rng), rng, 5, (96, 96)), captioner.processor) for _ in range(20)]
    hidden = said = 0
    for row in rows:
        later = drop_words(row, rng, 0.2)
        assert (later.targets, later.mask) == (row.targets, row.mask)
        for t, (before, after) in enumerate(zip(row.ids, later.ids)):
            follows = t > 0 and row.targets[t - 1] == before and row.mask[t - 1] == row.mask[t]
            said += follows
            hidden += before != after
            assert before == after or (follows and after == 0)
    assert 0.15 < hidden / said < 0.25


def test_scenes_in_unnamed_colours_teach_no_colour(captioner):
    """Nothing drawn is near a named colour, and no colour's name is read or asked for; shapes and places are."""
    rng = Random("unnamed")
    names, words = recipe.color_token_ids(captioner.tokenizer), set(recipe.COLORS)
    for _ in range(30):
        scene = with_unnamed_colors(random_scene(rng), rng)
        assert all(math.dist(t.rgb, c) >= 50 for t in scene.shapes for c in recipe.COLORS.values())
        example = scene_example(scene, rng, 5, (96, 96), colorless=True)
        assert all(
            words.isdisjoint(re.findall(r"\w+", prompt + " " + answer)) for prompt, answer in example.qa_pairs[1:]
        )
        row = encode(example, captioner.processor)
        bare = recipe.mask_tokens(row, names)
        assert names & set(row.targets) and not names & (set(bare.ids) | set(bare.targets))
        changed = [i for i, (a, b) in enumerate(zip(row.targets, bare.targets)) if a != b]
        assert changed == [i for i, a in enumerate(row.targets) if a in names]
        assert captioner.tokenizer.encode(f" {scene.shapes[0].kind}")[0] in bare.targets


def test_a_conversation_is_the_same_words_in_another_order_each_after_the_others(captioner):
    example = scene_example(random_scene(rng := Random("talk")), rng, 8, (96, 96))
    talks = [recipe.as_conversation(example, rng) for _ in range(4)]
    assert all(sorted(talk.qa_pairs) == sorted(example.qa_pairs) for talk in talks)
    assert len({tuple(talk.qa_pairs) for talk in talks}) == 4
    assert (
        len(set(encode(talks[0], captioner.processor).mask)) == 2 < len(set(encode(example, captioner.processor).mask))
    )


def test_conversations_begin_at_their_scheduled_step_and_change_no_earlier_batch(captioner):
    batches, first = partial(recipe.batches, captioner.processor, batch_size=8, seed=0), max(recipe.CONVERSATION_SHARE)
    branches = [[len(row.unique()) for row in batches()(step)["attention_mask"]] for step in (first - 1, first)]
    assert min(branches[0]) > 3 >= min(branches[1]) and max(branches[1]) > 3, "0, 1 and 2 are a conversation"
    without = batches(conversation_share={0: 0.0})
    assert torch.equal(batches()(first - 1)["input_ids"], without(first - 1)["input_ids"])


def test_the_sample_is_a_drawn_scene_and_is_told_right(captioner):
    scene = random_scene(Random("sample 21"))
    with Image.open(SAMPLE) as sample:
        assert ImageChops.difference(sample, draw(scene, *sample.size)).getbbox() is None
    for prompt in CAPTION_PROMPTS:
        assert captioner.caption(SAMPLE, prompt) == caption(scene)


def test_cached_and_uncached_answers_are_the_same(captioner):
    """On pictures and prompts in one padded batch, to the last token."""
    rng = Random("cached")
    pictures = [[draw(random_scene(rng))] for _ in range(4)]
    inputs = captioner.processor(pictures, ["Describe this picture.", "How many objects are there?"] * 2)
    options = {"max_new_tokens": 40, "eos_token_id": captioner.tokenizer.eos_token_id}
    cached = captioner.model.generate(**inputs, **options)
    assert torch.equal(cached, captioner.model.generate(**inputs, **options, use_kv_cache=False))


def test_fresh_scenes_are_told_right(captioner):
    """A sample of what `python -m eval.captions` measures; with 60 of each, far below its bars."""
    result = measure(captioner, 60, 2, "test")
    assert result["captions"]["right"] >= 54
    assert result["withheld"]["right"] >= 50
    assert result["questions"]["right"] >= 108


def test_it_names_scenes_it_never_saw_at_four_to_three():
    scenes = [random_scene(Random(f"test {i}"), withheld=i % 2 == 1) for i in range(100)]
    said = Captioner.from_pretrained().captions([draw(scene, 160, 120) for scene in scenes])
    assert sum(text == caption(scene) for text, scene in zip(said, scenes)) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thousand_fresh_scenes_are_told_as_well_as_the_bars_ask(dtype):
    result = measure(Captioner.from_pretrained(dtype=dtype), 1000, 3, "slow")
    shares = {name: result[name]["right"] / result[name]["of"] for name in ("captions", "withheld", "questions")}
    assert shares["captions"] >= 0.96 and shares["withheld"] >= 0.90 and shares["questions"] >= 0.95, shares
