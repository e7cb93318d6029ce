"""How much a KV cache speeds up generation, by every cache design in this repository, with a check of the output.

    python -m eval.speedup                # the embedded model, about two minutes on 2 CPU cores
    python -m eval.speedup --shape 222M   # a published shape with random weights

Two models generate text about one image: the product's, whose language model reads image and text in one sequence, and
an encoder-decoder of the same size with random weights, which reads the image by cross-attention. All designs run in
interleaved rounds; each figure is a median, +- half the distance between the fastest and the slowest round. A
generation is timed from the pixels to its last token, in one run for all lengths; its end token is ignored.

"grows as" is the growth of the time after the first token between the last two lengths: n^2 where every step reads all
tokens again, n^1 where each token is read once. Beside it is the growth of the floating-point operations in theory
(eval/lib/flops.py). A table of all designs follows (eval/lib/cache_table.py): memory, prefill against length, decode
against batch, and what each can do. Last, minGPT's two models learn to sort and must agree on every input
(eval/sort_task.py). The command fails if a design yields other tokens than no cache in float32.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from eval.lib.attribution import attribute, attribution_table
from eval.lib.cache_memory import compare_heads, memory_table
from eval.lib.cache_table import cache_table, render
from eval.lib.cache_timing import StudyResult, time_designs
from eval.lib.cache_variants import UNCACHED, StudyCase, encoder_decoder, language_model
from eval.lib.command import add_threads_flag, make_parser, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.shapes import SHAPES
from eval.sort_task import SortTask, sort_task, summary
from models.kv_study.encoder_decoder import EncoderDecoder
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, PROMPT, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.cli.main import Parser
from nanovlm.device import DTYPES, choose_device
from nanovlm.errors import NanoVLMError
from nanovlm.processing.image_loading import load_image

LENGTHS = (16, 32, 64, 128, 256, 512)
TEXT_TOKENS = 16  # of a published shape's prompt, after the image
PUBLISHED = "published for nanoVLM's per-block cache (Hugging Face's blog, June 2025: \"38% speedup\")"
PUBLISHED_SPEEDUP = 1.38
TERMINAL = Path("-")  # --plot without a file


def table(result: StudyResult) -> str:
    """One model's designs; below each, its speedup over no cache."""
    lines = [
        f"{result.model}: {result.parameters / 1e6:.1f}M parameters, a prompt of {result.prompt_tokens} tokens; "
        f"vision {result.vision_ms:.2f} ms, prefill {result.prefill_ms:.2f} ms",
        f"{'new tokens, ms':22}" + "".join(f"{n:>16}" for n in result.lengths)
        + f"{'ms/token':>10}{'grows as':>10}{'FLOPs as':>10}  same ids",
    ]  # fmt: skip
    uncached = next(curve for curve in result.curves if curve.design == UNCACHED)
    for curve in result.curves:
        cells = (f"{ms:,.1f} ±{half:,.1f}" for ms, half in zip(curve.total_ms, curve.spread_ms))
        growth = (f"n^{exponent:.2f}" for exponent in (curve.exponent, curve.flops_exponent))
        lines.append(
            f"{curve.design:22}" + "".join(f"{cell:>16}" for cell in cells)
            + f"{curve.token_ms:>10.2f}" + "".join(f"{text:>10}" for text in growth)
            + f"  {curve.same_ids} of {max(result.lengths)}"
        )  # fmt: skip
        if curve is not uncached:
            speedups = (slow / fast for slow, fast in zip(uncached.total_ms, curve.total_ms))
            lines.append(f"{'  times faster':22}" + "".join(f"{speedup:>15.2f}x" for speedup in speedups))
    return "\n".join(lines)


def embedded_model(device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """The embedded model, with the sample image and the default prompt: ids (1, T), images (1, 3, S, S)."""
    captioner = Captioner.from_pretrained(EMBEDDED, device.type, dtype)
    inputs = captioner.processor([[load_image(SAMPLE)]], [PROMPT])
    return captioner.model, inputs["input_ids"], inputs["images"]


def random_model(shape: str, device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """A published shape with random weights, a random image and 16 random text tokens."""
    cfg, _ = SHAPES[shape]
    text = torch.randint(cfg.lm_vocab_size, (1, TEXT_TOKENS))
    ids = torch.cat([text.new_full((1, cfg.mp_image_token_length), -1), text], dim=1)
    model = VisionLanguageModel(cfg, image_token_id=-1)
    return model.to(device, DTYPES[dtype]).eval(), ids, torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size)


def make_cases(
    model: VisionLanguageModel, ids: Tensor, images: Tensor, max_new_tokens: int, *, export: bool
) -> tuple[StudyCase, StudyCase]:
    """The product's model, and an encoder-decoder of its size with random weights, each with all designs."""
    twin = EncoderDecoder(model.cfg).to(model.device, model.dtype).eval()
    text = ids[:, ids[0] != model.image_token_id]
    progress("preparing, exporting five graphs" if export else "preparing")
    return (
        language_model(model, ids, images, max_new_tokens, export),
        encoder_decoder(twin, text, images[:1], max_new_tokens, export),
    )


def make_speedup_parser() -> Parser:
    parser = make_parser("speedup", __doc__)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    lengths = " ".join(map(str, LENGTHS))
    add("--shape", choices=tuple(SHAPES), help="a published shape, random weights (default: the embedded model)")
    add("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help=f"new tokens (default: {lengths})")
    add("--rounds", type=positive, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="(default: auto)")
    add("--dtype", default="float32", choices=tuple(DTYPES), help="lower ones may choose other ids (default: float32)")
    add("--export", action=switch, default=True, help="measure the exported graphs too (default: yes)")
    add("--sort-task", action=switch, default=True, help="run the sorting task too (default: yes)")
    add("--table", action=switch, default=True, help="measure all designs in one table too (default: yes)")
    add("--attribute", action=switch, default=True, help="split minGPT's speedup into its causes (default: yes)")
    plots = "draw a figure, which needs the extra eval, or without a file in the terminal, which needs the extra plot"
    add("--plot", nargs="?", type=Path, const=TERMINAL, metavar="FILE.png", help=plots)
    add_threads_flag(parser)
    return parser


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    if len(args.lengths) < 2 or min(args.lengths) < 2 or sorted(set(args.lengths)) != list(args.lengths):
        parser.error(f"--lengths {' '.join(map(str, args.lengths))}: give two or more, rising, from 2 on")
    if args.plot:
        package, extra = ("plotext", "plot") if args.plot == TERMINAL else ("matplotlib", "eval")
        if importlib.util.find_spec(package) is None:
            parser.error(f'--plot needs {package}: pip install "nanovlm[{extra}]"')
    if args.plot and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")


def failures(results: Sequence[StudyResult], sorting: SortTask | None, dtype: torch.dtype) -> list[str]:
    """Designs whose tokens differ from those without a cache; below float32, rounding may change them."""
    messages = []
    for result in results if dtype == torch.float32 else ():
        for curve in result.curves:
            if curve.same_ids < max(result.lengths):
                messages.append(f"{result.model}: {curve.design} differs from {UNCACHED} after {curve.same_ids} tokens")
    return messages + (sorting.failures if sorting else [])


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_speedup_parser()
    args = parser.parse_args(argv)
    check_flags(parser, args)
    torch.manual_seed(0)
    try:
        device = choose_device(args.device)
        if args.shape:
            model, ids, images = random_model(args.shape, device, args.dtype)
        else:
            model, ids, images = embedded_model(device, args.dtype)
        model.validate_length(ids.size(1), max(args.lengths))
    except NanoVLMError as error:
        parser.error(str(error))
    ids, images = ids.to(device), images.to(device, model.dtype)
    cases = make_cases(model, ids, images, max(args.lengths), export=args.export)
    results = [time_designs(case, args.lengths, args.rounds, device) for case in cases]
    twin = cast(EncoderDecoder, cases[1].model)
    designs = cache_table(model, twin, images) if args.table else None
    attribution = attribute(device) if args.attribute else []
    heads = compare_heads(device)
    sorting = sort_task() if args.sort_task else None

    where = environment(device, model.dtype)
    if args.plot and args.plot != TERMINAL:
        from eval.lib.plot import draw

        draw(results, where, args.plot)
    data: dict[str, object] = {
        "studies": [asdict(result) for result in results],
        "cache_table": asdict(designs) if designs else None,
        "attribution": [asdict(row) for row in attribution],
        "key_value_heads": [asdict(row) for row in heads],
        "sort_task": asdict(sorting) if sorting else None,
    }
    data["published_speedup"] = PUBLISHED_SPEEDUP
    parts = [*map(table, results), f"{PUBLISHED}: {PUBLISHED_SPEEDUP:.2f}x"]
    parts += [memory_table(f"cache of the {result.model}", result.memory) for result in results]
    parts.append(memory_table("key and value heads at equal width", heads))
    parts += [attribution_table(attribution)] if attribution else []
    if args.plot == TERMINAL:
        from eval.lib.terminal_plot import draw_in_terminal

        parts += map(draw_in_terminal, results)
    parts += [f"{render(designs)}\n"] if designs else []
    text = "\n\n".join(parts)
    text += f"\n{summary(sorting)}" if sorting else ""
    messages = failures(results, sorting, model.dtype)
    if designs and model.dtype == torch.float32:
        messages += designs.failures
    where += f"; medians of {args.rounds} rounds"
    return report(data, text, where, args.json, messages)


if __name__ == "__main__":
    sys.exit(main())
