"""How many pictures a minute a folder of mixed pictures takes, beside asking of them one after another.

    python -m eval.captions --throughput
    python -m eval.captions --throughput --shape 230M --pictures 24    # a published model's size, random weights

The pictures are drawn scenes of 96 to 1024 pixels a side, as PNG, JPEG and WebP, in a folder that vanishes afterwards;
their captions are written beside them.
"""

import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

import tokenizers
import torch

from eval.lib.shapes import SHAPES
from eval.real_size import make_tokenizer
from models.inference.inference_model import make_fast
from models.vision_language_model import VisionLanguageModel
from nanovlm import PROMPT
from nanovlm.bulk.captioning import BulkCaptioner
from nanovlm.bulk.outputs import Sidecars
from nanovlm.captioner import Captioner
from nanovlm.device import choose_device, choose_dtype
from nanovlm.processor import Processor
from nanovlm.synthetic import draw, random_scene
from nanovlm.tokenizer import Tokenizer

SIDES = (96, 1024)
ROUNDS = 5
KINDS = ("png", "jpg", "webp")


def write_pictures(folder: Path, n: int, seed: str) -> list[str]:
    """n scenes of random sizes and kinds of file."""
    rng = Random(f"throughput {seed}")
    paths = [folder / f"{i:05}.{rng.choice(KINDS)}" for i in range(n)]
    for path in paths:
        draw(random_scene(rng), rng.randint(*SIDES), rng.randint(*SIDES)).save(path)
    return list(map(str, paths))


def of_shape(name: str, device: str, dtype: str) -> Captioner:
    """A captioner as large as the published one of that name; what it says is noise and seldom ends by itself."""
    cfg, place = SHAPES[name][0], choose_device(device)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(make_tokenizer(cfg)), cfg)
    torch.manual_seed(0)
    model = VisionLanguageModel(cfg, tokenizer.image_token_id).eval()
    return Captioner(make_fast(model.to(place, choose_dtype(dtype, place))), Processor(cfg, tokenizer))


def measure(captioner: Captioner, n: int, seed: str) -> dict:
    """Pictures a minute one after another and as a folder, the share of time in the model, and how often both agree.

    In ROUNDS, of which each asks of its share of the pictures and then runs the whole folder: the figures are medians.
    """
    said, alone, folder, busy, failed = {}, [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        pictures = write_pictures(Path(name), n, seed)
        captioner.caption(pictures[0])  # warm
        for first in range(min(ROUNDS, n)):
            share, started = pictures[first::ROUNDS], time.perf_counter()
            said |= {picture: captioner.caption(picture) for picture in share}
            alone.append(len(share) / (time.perf_counter() - started))
            run = BulkCaptioner(captioner, PROMPT, {"max_new_tokens": 128})
            run(pictures, run.batch_size, Sidecars(Path(name), "overwrite", {}).write, lambda *why: failed.append(why))
            folder.append(n / run.seconds)
            busy.append(run.busy)
        if failed:
            raise RuntimeError(f"of {n} pictures some failed, the first: {failed[0]}")
        same = sum(Path(p).with_suffix(".txt").read_text("utf-8").strip() == text.strip() for p, text in said.items())
    return {
        "pictures": n,
        "one_by_one_per_minute": round(60 * median(alone)),
        "folder_per_minute": round(60 * median(folder)),
        "times": round(median(folder) / median(alone), 2),
        "busy": round(median(busy), 3),
        "same": same,
    }


def table(result: dict) -> str:
    return (
        f"one after another  {result['one_by_one_per_minute']:7,} pictures a minute\n"
        f"a folder of {result['pictures']:<5,}  {result['folder_per_minute']:7,} pictures a minute, "
        f"{result['times']:.1f} times as many; model busy {result['busy']:.0%} of the time\n"
        f"the same caption   {result['same']:7,} of {result['pictures']:,}"
    )
