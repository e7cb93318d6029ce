"""How much a KV cache speeds up generation, by every cache design in this repository, with a check of the output.

    python -m eval.speedup                     # the embedded model, some three minutes on 2 CPU cores
    python -m eval.speedup --model-size 222M   # a published size with random weights
    python -m eval.speedup --quality evict     # instead of times: exact answers with less of the cache

Two models generate text about one image: the product's, whose language model reads image and text in one sequence, and
an encoder-decoder of the same size with random weights, which reads the image by cross-attention. All designs run in
interleaved rounds; each figure is a median, +- half the distance between the fastest and the slowest round. A
generation is timed from the pixels to its last token, in one run for all lengths; its end token is ignored.

"grows as" is the growth of the time after the first token between the last two lengths: n^2 where every step reads all
tokens again, n^1 where each token is read once. Beside it is the growth of the floating-point operations that PyTorch
counts in matmuls and attention. A second table compares memory, prefill by length, decode by batch size, and the ids
with those of no cache. "bytes/token" are the keys and values held after the longest generation, divided by the tokens
then read; those of the image, for cross-attention, are apart. Last, minGPT's two models learn to sort and must agree on
every input (eval/sort_task.py). The command fails if a design yields other tokens than no cache in float32.

--quality measures what designs that change the output cost: exact captions and answers of the embedded model about
freshly drawn scenes, as eval.captions counts them. "evict" forgets tokens (models/kv_study/eviction.py),
"bits" rounds keys and values (quantized_cache.py); "logit error" is over the first tokens, given the same tokens.
"guess" decodes speculatively (speculative.py), whose answers must be the same: tokens per step, and time per token.
"share" trains models whose heads or blocks share their cache (sharing.py) on the sorting task, for 1,200 steps at most.

--save appends what is printed, with the command line, to eval/results.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.benchmark import attribute, attribution_table
from eval.lib.cache_answers import answers_table, eviction_answers, make_batches, quantized_answers
from eval.lib.cache_study import Sizes, Study, designs_table, generations_table, make_case, measure_case
from eval.lib.command import add_device_flags, add_save_flag, make_parser, positive, report
from eval.lib.hardware import environment
from eval.lib.shapes import SHAPES
from eval.lib.sharing_study import measure_sharing, sharing_table
from eval.lib.speculation import measure_speculation, speculation_table
from eval.sort_task import sort_task, summary
from models.checkpoint import load_config
from models.config import VLMConfig
from models.kv_study.encoder_decoder import EncoderDecoder
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, PROMPT, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.device import DTYPES, choose_device, choose_dtype
from nanovlm.errors import NanoVLMError

LENGTHS = (16, 32, 64, 128, 256, 512)
QUALITY: dict[str, tuple[Callable[..., list[Any]], Callable[..., str]]] = {  # rows, and their table
    "evict": (eviction_answers, answers_table),
    "bits": (quantized_answers, answers_table),
    "guess": (measure_speculation, speculation_table),
    "share": (lambda *_: measure_sharing(), sharing_table),
}
TEXT_TOKENS = 16  # of a published size's prompt, after the image
PUBLISHED = "published for nanoVLM's per-block cache (Hugging Face's blog, June 2025: \"38% speedup\"): 1.38x"


def embedded_model(device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """The embedded model, with the sample image and the default prompt: ids (1, T), images (1, 3, S, S)."""
    captioner = Captioner.from_pretrained(EMBEDDED, device.type, dtype)
    ids, tiles = captioner.prepare(SAMPLE, PROMPT)
    return captioner.model, torch.tensor([ids]), torch.cat(tiles)


def random_model(size: str, device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """A published size with random weights, a random image and 16 random text tokens."""
    cfg, _ = SHAPES[size]
    text = torch.randint(cfg.lm_vocab_size, (1, TEXT_TOKENS))
    ids = torch.cat([text.new_full((1, cfg.mp_image_token_length), -1), text], dim=1)
    model = VisionLanguageModel(cfg, image_token_id=-1)
    return model.to(device, DTYPES[dtype]).eval(), ids, torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size)


def measure(args: argparse.Namespace) -> list[Study]:
    """All designs of the product's model, and of an encoder-decoder of its size with random weights.

    Raises NanoVLMError for sizes that the model has no positions for.
    """
    torch.manual_seed(0)
    device, sizes = choose_device(args.device), Sizes(tuple(args.lengths), rounds=args.rounds)
    if not args.table:
        sizes = replace(sizes, prompts=(), batches=())
    make = partial(random_model, args.model_size) if args.model_size else embedded_model
    model, ids, images = make(device, args.dtype)
    model.validate_length(ids.size(1), max(sizes.lengths))
    ids, images = ids.to(device), images.to(device, model.dtype)
    twin = EncoderDecoder(model.cfg).to(device, model.dtype).eval()
    text = ids[ids != model.image_token_id][None]  # its image is read by cross-attention
    cases = [make_case(model, ids, images, sizes, export=args.export)]
    cases.append(make_case(twin, text, images[:1], sizes, export=args.export))
    return [measure_case(case, sizes) for case in cases]


def measure_quality(args: argparse.Namespace) -> int:
    """The tables of --quality."""
    device = choose_device(args.device)
    captioner = Captioner.from_pretrained(EMBEDDED, device.type, args.dtype)
    batches = make_batches(captioner, args.scenes)
    rows = {name: QUALITY[name][0](captioner, batches) for name in args.quality}
    tables = [QUALITY[name][1](f"{name}, {args.scenes} scenes", rows[name]) for name in rows]
    data = {name: [asdict(row) for row in rows[name]] for name in rows}
    where, wrong = environment(device, DTYPES[args.dtype]), [row for row in rows.get("guess", ()) if not row.is_exact]
    failures = [f"{row.task}, {row.guess}: {row.identical} of {row.answers} are plain decoding's" for row in wrong]
    failures = failures if args.dtype == "float32" else []
    return report(data, "\n\n".join(tables), where, args.json, failures, args.save)


def make_speedup_parser() -> Parser:
    parser = make_parser("speedup", __doc__)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    lengths = " ".join(map(str, LENGTHS))
    add("--model-size", choices=tuple(SHAPES), help="a published size, random weights (default: the embedded model)")
    add("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help=f"new tokens (default: {lengths})")
    add("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--export", action=switch, default=True, help="measure the exported graphs too (default: yes)")
    add("--sort-task", action=switch, default=True, help="run the sorting task too (default: yes)")
    add("--table", action=switch, default=True, help="time prompt lengths and batch sizes too (default: yes)")
    add("--attribute", action=switch, default=True, help="split minGPT's speedup into its causes (default: yes)")
    add("--quality", nargs="+", choices=tuple(QUALITY), help="measure exact answers instead of times")
    add("--scenes", type=positive, default=300, metavar="N", help="drawn scenes for --quality (default: 300)")
    add("--html", type=Path, metavar="FILE.html", help="write a page: the squares step by step, memory, the tables")
    add_device_flags(parser, "float32")
    add_save_flag(parser)
    return parser


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    if len(args.lengths) < 2 or min(args.lengths) < 2 or sorted(set(args.lengths)) != list(args.lengths):
        parser.error(f"--lengths {' '.join(map(str, args.lengths))}: give two or more, rising, from 2 on")
    if args.html and not args.html.parent.is_dir():
        parser.error(f"--html {args.html}: there is no folder {args.html.parent}")


def write_page(path: Path, cfg: VLMConfig, tables: str) -> None:
    """The page of --html, which needs no network; sliders begin at the model's sizes."""
    page = Path(__file__).with_name("lib").joinpath("cache_page.html").read_text("utf-8")
    sizes = {"BLOCKS": cfg.lm_n_blocks, "HEADS": cfg.lm_n_kv_heads, "SIZE": cfg.lm_head_dim}
    for name, value in sizes.items():
        page = page.replace(f"VALUES_{name}", str(value))
    path.write_text(page.replace("TABLES", escape(tables)), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_speedup_parser()
    args = parser.parse_args(argv)
    check_flags(parser, args)
    try:
        device = choose_device(args.device)
        args.dtype = str(choose_dtype(args.dtype, device)).removeprefix("torch.")
        if args.quality:
            return measure_quality(args)
        studies = measure(args)
    except NanoVLMError as error:
        parser.error(str(error))
    attribution = attribute(device) if args.attribute else []
    sorting = sort_task() if args.sort_task else None
    where = environment(device, DTYPES[args.dtype])
    parts = [*map(generations_table, studies), PUBLISHED]
    parts += [f"{study.model}\n{designs_table(study)}" for study in studies]
    parts += [attribution_table(attribution)] if attribution else []
    parts += [summary(sorting)] if sorting else []
    data = {
        "studies": [asdict(study) for study in studies],
        "attribution": [asdict(row) for row in attribution],
        "sort_task": asdict(sorting) if sorting else None,
    }
    failures = [line for study in studies if args.dtype == "float32" for line in study.failures]
    failures += sorting.failures if sorting else []
    where += f"; medians of {args.rounds} rounds"
    if args.html:
        cfg = SHAPES[args.model_size][0] if args.model_size else load_config(EMBEDDED)
        write_page(args.html, cfg, "\n\n".join([*parts, where]))
    return report(data, "\n\n".join(parts), where, args.json, failures, args.save)


if __name__ == "__main__":
    sys.exit(main())
