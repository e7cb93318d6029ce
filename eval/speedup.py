"""Speedup of generation by every KV cache design in this repository, with a check of the output.

    python -m eval.speedup                     # the embedded model, some three minutes on 2 CPU cores
    python -m eval.speedup --model-size 222M   # a published size with random weights
    python -m eval.speedup --quality evict     # instead of times: exact answers with less of the cache

Two models generate text about one image: the product's, whose language model reads image and text in one sequence, and
an encoder-decoder of the same size with random weights, which reads the image by cross-attention. All designs run in
interleaved rounds; each figure is a median, +- half the distance between the fastest and the slowest round. A
generation is timed from the pixels to its last token, in one run for all lengths; its end token is ignored.

"grows as" is the growth of the time after the first token between the last two lengths: n^2 where every step reads all
tokens again, n^1 where each token is read once. Beside it is the growth of the floating-point operations that PyTorch
counts in matmuls and attention. A second table compares memory, and the ids with those of no cache. "bytes/token" are
the keys and values held after the longest generation, divided by the tokens then read; those of the image, for
cross-attention, are apart. Last, minGPT's two models learn to sort and must agree on every input (eval/sort_task.py).
The command fails if a design yields other tokens than no cache in float32.

--quality measures what designs that change the output cost: exact captions and answers of the embedded model about
freshly drawn scenes, as eval.captions counts them. "evict" forgets tokens (models/kv_study/eviction.py),
"bits" rounds keys and values (quantized_cache.py); "logit error" is over the first tokens, given the same tokens.
"guess" decodes speculatively (speculative.py), whose answers must be the same: tokens per step, and time per token.
"share" trains models whose heads or blocks share their cache (sharing.py) on the sorting task, for 1,200 steps at most.

--save appends what is printed, with the command line, to eval/results.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.benchmark import attribute, attribution_table
from eval.lib import cache_quality
from eval.lib.cache_designs import Sizes, Study, designs_table, generations_table, measure_designs
from eval.lib.command import Measured, add_device_flags, environment, positive, run
from eval.lib.random_model import SHAPES
from eval.sort_task import sort_task, summary
from models.kv_study.encoder_decoder import EncoderDecoder
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, PROMPT, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.device import DTYPES, choose_device, choose_dtype
from nanovlm.errors import UsageError

LENGTHS = (16, 32, 64, 128, 256, 512)
QUALITY: dict[str, tuple[Callable[..., list[dict[str, Any]]], Callable[..., str]]] = {  # rows, and their table
    "evict": (partial(cache_quality.smaller_caches, "evict"), cache_quality.answers_table),
    "bits": (partial(cache_quality.smaller_caches, "bits"), cache_quality.answers_table),
    "guess": (cache_quality.measure_speculation, cache_quality.speculation_table),
    "share": (lambda *_: cache_quality.measure_sharing(), cache_quality.sharing_table),
}
TEXT_TOKENS = 16  # of a published size's prompt, after the image
PUBLISHED = "published for nanoVLM's per-block cache (Hugging Face's blog, June 2025: \"38% speedup\"): 1.38x"


def load_model(size: str | None, device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """A model with a prompt, ids (1, T), about images (1, 3, S, S): the embedded one, or random weights and inputs."""
    if size is None:
        captioner = Captioner.from_pretrained(EMBEDDED, device.type, dtype)
        prompt, tiles = captioner.prepare(SAMPLE, PROMPT)
        return captioner.model, torch.tensor([prompt]), torch.cat(tiles)
    cfg, _ = SHAPES[size]
    text = torch.randint(cfg.lm_vocab_size, (1, TEXT_TOKENS))
    ids = torch.cat([text.new_full((1, cfg.mp_image_token_length), -1), text], dim=1)
    model = VisionLanguageModel(cfg, image_token_id=-1)
    return model.to(device, DTYPES[dtype]).eval(), ids, torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size)


def measure(args: argparse.Namespace, device: torch.device) -> list[Study]:
    """All designs of the product's model, and of an encoder-decoder of its size with random weights.

    Raises NanoVLMError for sizes that the model has no positions for.
    """
    torch.manual_seed(0)
    sizes = Sizes(tuple(args.lengths), rounds=args.rounds)
    model, ids, images = load_model(args.model_size, device, args.dtype)
    model.cfg.validate_length(ids.size(1), max(sizes.lengths))
    ids = ids.to(device)
    images = images.to(device, model.dtype)
    twin = EncoderDecoder(model.cfg).to(device, model.dtype).eval()
    text = ids[ids != model.image_token_id][None]  # its image is read by cross-attention
    study = measure_designs(model, ids, images, sizes, export=args.export)
    return [study, measure_designs(twin, text, images[:1], sizes, export=args.export)]


def measure_quality(args: argparse.Namespace, device: torch.device) -> tuple[dict, str, list[str]]:
    """The rows, tables and failures of --quality."""
    captioner = Captioner.from_pretrained(EMBEDDED, device.type, args.dtype)
    batches = cache_quality.make_batches(captioner, args.scenes)
    rows = {name: QUALITY[name][0](captioner, batches) for name in args.quality}
    tables = [QUALITY[name][1](f"{name}, {args.scenes} scenes", rows[name]) for name in rows]
    failures = [
        f"{row['task']}, {row['guess']}: {row['identical']} of {row['answers']} are plain decoding's"
        for row in rows.get("guess", ())
        if row["identical"] < row["answers"] and args.dtype == "float32"
    ]
    return rows, "\n\n".join(tables), failures


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    lengths = " ".join(map(str, LENGTHS))
    add("--model-size", choices=tuple(SHAPES), help="a published size, random weights (default: the embedded model)")
    add("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help=f"new tokens (default: {lengths})")
    add("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--export", action=switch, default=True, help="measure the exported graphs too (default: yes)")
    add("--sort-task", action=switch, default=True, help="run the sorting task too (default: yes)")
    add("--attribute", action=switch, default=True, help="split minGPT's speedup into its causes (default: yes)")
    add("--quality", nargs="+", choices=tuple(QUALITY), help="measure exact answers instead of times")
    add("--scenes", type=positive, default=300, metavar="N", help="drawn scenes for --quality (default: 300)")
    add_device_flags(parser, "float32")


def measure_flags(args: argparse.Namespace) -> Measured:
    """Measure what the flags name."""
    if len(args.lengths) < 2 or min(args.lengths) < 2 or sorted(set(args.lengths)) != list(args.lengths):
        raise UsageError(f"--lengths {' '.join(map(str, args.lengths))}: give two or more, rising, from 2 on")
    device = choose_device(args.device)
    args.dtype = str(choose_dtype(args.dtype, device)).removeprefix("torch.")
    where = environment(device, DTYPES[args.dtype])
    if args.quality:
        rows, text, failures = measure_quality(args, device)
        return rows, text, where, failures
    studies = measure(args, device)
    attribution = attribute(device) if args.attribute else []
    sorting = sort_task() if args.sort_task else None
    parts = [*map(generations_table, studies), PUBLISHED]
    parts += [f"{study.model}\n{designs_table(study)}" for study in studies]
    parts += [attribution_table(attribution)] if attribution else []
    parts += [summary(sorting)] if sorting else []
    failures = [line for study in studies if args.dtype == "float32" for line in study.failures]
    failures += sorting.failures if sorting else []
    data: dict[str, Any] = {"studies": [asdict(study) for study in studies], "attribution": attribution}
    data["sort_task"] = asdict(sorting) if sorting else None
    return data, "\n\n".join(parts), f"{where}; medians of {args.rounds} rounds", failures


main = partial(run, "speedup", __doc__, add_flags, measure_flags)

if __name__ == "__main__":
    sys.exit(main())
