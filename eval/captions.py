"""How often the model is right: captions and answers on freshly drawn scenes that no training has seen.

python -m eval.captions --scenes 1000
"""

from collections import Counter
from collections.abc import Iterator
from random import Random

from PIL import Image

from models.vision_language_model import VisionLanguageModel
from nanovlm.processor import Processor
from nanovlm.scenes import caption, draw, questions, random_scene

PROMPT = "Describe this picture."


def answers(
    model: VisionLanguageModel, processor: Processor, asked: list[tuple[Image.Image, str]], batch_size: int = 64
) -> Iterator[str]:
    """The model's greedy answer to each (picture, prompt)."""
    tokenizer = processor.tokenizer
    for start in range(0, len(asked), batch_size):
        some = asked[start : start + batch_size]
        inputs = processor([[picture] for picture, _ in some], [prompt for _, prompt in some])
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        ids = model.generate(**inputs, max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)
        yield from (tokenizer.decode(row) for row in ids.tolist())


def evaluate(model, processor, n_scenes: int, seed: str = "eval", n_questions: int = 3) -> dict:
    rng = Random(seed)
    result = {}
    for split in ("caption", "withheld"):
        scenes = [random_scene(rng, withheld=split == "withheld") for _ in range(n_scenes)]
        pictures = [draw(scene, rng.randint(96, 320), rng.randint(96, 320)) for scene in scenes]
        said = list(answers(model, processor, [(picture, PROMPT) for picture in pictures]))
        wrong = [(s, caption(scene)) for s, scene in zip(said, scenes) if s != caption(scene)]
        result[split] = 1 - len(wrong) / n_scenes
        result[split + "_wrong"] = wrong[:6]
        if split == "caption":
            asked = [(p, q, a) for p, scene in zip(pictures, scenes) for q, a in questions(scene, rng)[:n_questions]]
            said = list(answers(model, processor, [(p, q) for p, q, _ in asked], 128))
            result["questions"] = sum(s == a for s, (_, _, a) in zip(said, asked)) / len(asked)
            kind = [" ".join(q.split()[:2]) for _, q, _ in asked]
            right, all = Counter(k for k, s, (_, _, a) in zip(kind, said, asked) if s == a), Counter(kind)
            result["kinds"] = {k: (round(right[k] / n, 3), n) for k, n in all.items()}
    return result
