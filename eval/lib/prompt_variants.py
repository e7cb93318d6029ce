"""Ways to ask for a caption, and for the number of objects: those that training uses, and others that people type."""

import re
from random import Random

from eval.lib.scene_splits import Renderer, png
from nanovlm.captioner import Captioner
from nanovlm.cli.caption import LENGTHS
from nanovlm.synthetic import Scene, caption, draw, random_scene
from nanovlm.synthetic.captions import NUMBERS
from nanovlm.synthetic.recipe import CAPTION_PROMPTS, SHORT_PROMPTS, scene_example

# What people ask. Training may come to use any of these, too: `trained_prompts` says which it does.
CAPTION_VARIANTS = tuple(dict.fromkeys((
    *CAPTION_PROMPTS, *(prompt for prompt, _ in LENGTHS.values()),
    "Describe the scene.", "Tell me what you see.", "What does this image show?", "What is shown here?",
    "Give a caption for this picture.", "Please describe this picture.", "Describe everything in the picture.",
    "What can you see?",
)))  # fmt: skip
COUNT_VARIANTS = (
    "How many objects are there?", "How many shapes are there?", "How many shapes?", "how many objects",
    "How many things do you see?", "How many objects are in the picture?", "How many figures are there?",
    "Count the shapes.", "What is the number of objects?",
)  # fmt: skip
_N_SAMPLED = 1000  # training examples; a prompt that is in use occurs in at least one of 100


def measure_prompt_variants(
    captioner: Captioner, n_scenes: int, seed: str, batch_size: int, renderer: Renderer = draw
) -> dict[str, dict]:
    """Exact matches of every prompt about the same n_scenes scenes, and whether training uses it ("trained")."""
    rng = Random(f"wordings {seed}")
    scenes = [random_scene(rng) for _ in range(n_scenes)]
    images = [png(scene, rng, renderer) for scene in scenes]
    trained, results = trained_prompts(), {}
    for prompt in (*CAPTION_VARIANTS, *COUNT_VARIANTS):
        answers = captioner.captions(images, prompt, batch_size=batch_size)
        right = sum(answer == expected_answer(prompt, scene) for answer, scene in zip(answers, scenes))
        results[prompt] = {"right": right, "of": n_scenes, "trained": simplified(prompt) in trained}
    return results


def expected_answer(prompt: str, scene: Scene) -> str:
    """The number of objects, a caption without sizes and background where training asks for one, or a caption."""
    if prompt in COUNT_VARIANTS:
        return NUMBERS[len(scene.shapes)]
    return shortened(caption(scene)) if prompt in SHORT_PROMPTS else caption(scene)


def shortened(text: str) -> str:
    """A caption without sizes and background."""
    text = re.sub("(small|large) ", "", text.split(" on a ")[0])
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text) + "."


def trained_prompts(n_sampled: int = _N_SAMPLED) -> set[str]:
    """The prompts that ask for captions in training, and those of sampled training examples, `simplified`."""
    rng = Random("wordings")
    prompts = {*CAPTION_PROMPTS}
    for _ in range(n_sampled):
        prompts.update(prompt for prompt, _ in scene_example(random_scene(rng), rng, 20, None).qa_pairs)
    return {simplified(prompt) for prompt in prompts}


def simplified(prompt: str) -> str:
    """Without capitals and the final mark, as training also shows prompts."""
    return prompt.lower().rstrip("?.")
