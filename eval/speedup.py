"""How much faster a key/value cache makes generation, by every design in this repository, and that it says the same.

    python -m eval.speedup                # the embedded model, about two minutes on 2 CPU cores
    python -m eval.speedup --shape 222M   # a published shape with random weights

Two models tell about one picture: the product's, whose language model reads image and words in one sequence, and an
encoder-decoder of the same measures with random weights, which looks at the image by cross-attention. All designs take
turns; each figure is the median over rounds, +- half the distance between the fastest and the slowest. A generation is
timed from the pixels to its last token, in one run for all lengths; its end token is ignored, so that it goes on.

"grows as" says how the time after the first token grows between the last two lengths: n^2 where everything is read
again for every token, n^1 where each is read once. Beside it stands the same of the floating-point operations that
theory counts (eval/lib/flops.py). Last, minGPT's twins learn to sort and must agree on every input (eval/sort_task.py).
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from eval.lib.cache_timing import StudyResult, time_designs
from eval.lib.cache_variants import UNCACHED, encoder_decoder, language_model
from eval.lib.command import make_parser, positive, progress, report
from eval.lib.hardware import environment
from eval.lib.shapes import SHAPES
from eval.sort_task import SortTask, sort_task, summary
from models.inference.cpu_kernels import onednn_pays_off, replace_linears
from models.kv_study.encoder_decoder import EncoderDecoder
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, PROMPT, SAMPLE
from nanovlm.captioner import Captioner
from nanovlm.device import DTYPES, choose_device
from nanovlm.image_processing import load_image

LENGTHS = (16, 32, 64, 128, 256, 512)
PUBLISHED = "published for nanoVLM's per-block cache (Hugging Face's blog, June 2025: \"38% speedup\")"
PUBLISHED_SPEEDUP = 1.38


def table(time_designs: StudyResult) -> str:
    """The study for a terminal; under each design, how many times faster it is than none."""
    lines = [
        f"{time_designs.model}: {time_designs.parameters / 1e6:.1f}M parameters, a prompt of {time_designs.prompt_tokens} tokens; "
        f"vision {time_designs.vision_ms:.2f} ms, prefill {time_designs.prefill_ms:.2f} ms",
        f"{'new tokens, ms':22}" + "".join(f"{n:>16}" for n in time_designs.lengths)
        + f"{'ms/token':>10}{'grows as':>10}{'FLOPs as':>10}  same ids",
    ]  # fmt: skip
    uncached = next(curve for curve in time_designs.curves if curve.design == UNCACHED)
    for curve in time_designs.curves:
        cells = (f"{ms:,.1f} ±{half:,.1f}" for ms, half in zip(curve.total_ms, curve.spread_ms))
        growth = (f"n^{e:.2f}" for e in (curve.exponent, curve.flops_exponent))
        lines.append(
            f"{curve.design:22}" + "".join(f"{cell:>16}" for cell in cells)
            + f"{curve.token_ms:>10.2f}" + "".join(f"{e:>10}" for e in growth)
            + f"  {curve.same_ids} of {max(time_designs.lengths)}"
        )  # fmt: skip
        if curve is not uncached:
            gains = (slow / fast for slow, fast in zip(uncached.total_ms, curve.total_ms))
            lines.append(f"{'  times faster':22}" + "".join(f"{gain:>15.2f}x" for gain in gains))
    return "\n".join(lines)


def embedded(device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """The model that ships, and what it reads of the sample picture: ids (1, T), images (1, 3, S, S)."""
    captioner = Captioner.from_pretrained(EMBEDDED, device.type, dtype)
    inputs = captioner.processor([[load_image(SAMPLE)]], [PROMPT])
    return captioner.model, inputs["input_ids"], inputs["images"]


def random_shape(name: str, device: torch.device, dtype: str) -> tuple[VisionLanguageModel, Tensor, Tensor]:
    """A published shape with random weights, one image of noise and 16 words."""
    cfg, _ = SHAPES[name]
    words = torch.randint(cfg.lm_vocab_size, (1, 16))
    ids = torch.cat([words.new_full((1, cfg.mp_image_token_length), -1), words], dim=1)
    model = VisionLanguageModel(cfg, image_token_id=-1)
    return model.to(device, DTYPES[dtype]).eval(), ids, torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size)


def flags() -> argparse.ArgumentParser:
    parser = make_parser("speedup", __doc__)
    add = parser.add_argument
    add("--shape", choices=tuple(SHAPES), help="a published shape with random weights (the embedded model)")
    add("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help=f"({' '.join(map(str, LENGTHS))})")
    add("--rounds", type=positive, default=5, metavar="N", help="of all designs in turn, for their medians (5)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="(auto)")
    add("--dtype", default="float32", choices=tuple(DTYPES), help="lower ones may choose other ids (float32)")
    add("--onednn", action=argparse.BooleanOptionalAction, default=onednn_pays_off(), help="float32 by oneDNN (on AMD)")
    add("--export", action=argparse.BooleanOptionalAction, default=True, help="the exported graphs too (yes)")
    add("--sort-task", action=argparse.BooleanOptionalAction, default=True, help="the sorting task too (yes)")
    add("--plot", type=Path, metavar="FILE.png", help="draw it; needs the extra eval")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = flags()
    args = parser.parse_args(argv)
    if len(args.lengths) < 2 or min(args.lengths) < 2 or sorted(set(args.lengths)) != list(args.lengths):
        parser.error(f"--lengths {' '.join(map(str, args.lengths))}: give two or more, rising, from 2 on")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "nanovlm[eval]"')
    if args.plot and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    try:
        device = choose_device(args.device)
        torch.manual_seed(0)
        make = random_shape if args.shape else embedded
        model, ids, images = make(*[args.shape] * bool(args.shape), device, args.dtype)
        model.validate_length(ids.size(1), max(args.lengths))
    except ValueError as error:
        parser.error(str(error))
    ids, images = ids.to(device), images.to(device, model.dtype)
    words, most = ids[:, ids[0] != model.image_token_id], max(args.lengths)

    twin = EncoderDecoder(model.cfg).to(device, model.dtype).eval()
    for module in (model, twin) if args.onednn else ():
        replace_linears(module)
    progress("preparing" + ", exporting five graphs" * args.export)
    subjects = (
        language_model(model, ids, images, most, args.export),
        encoder_decoder(twin, words, images[:1], most, args.export),
    )
    studies = [time_designs(subject, args.lengths, args.rounds, device) for subject in subjects]
    sorting = sort_task() if args.sort_task else None

    where = environment(device, model.dtype)
    if args.plot:
        from eval.lib.plot import draw

        draw(studies, where, args.plot)
    found = {"studies": [asdict(one) for one in studies], "sort_task": sorting and asdict(sorting)}
    text = "\n\n".join([*map(table, studies), f"{PUBLISHED}: {PUBLISHED_SPEEDUP:.2f}x"])
    text += f"\n{summary(sorting)}" if sorting else ""
    where += f"; medians of {args.rounds} rounds"
    found["published_speedup"] = PUBLISHED_SPEEDUP
    return report(found, text, where, args.json, failures(studies, sorting, model.dtype))


def failures(studies: Sequence[StudyResult], sorting: SortTask | None, dtype: torch.dtype) -> list[str]:
    """Where a cache changed what is said. Below float32 rounding may, and the table tells where."""
    differ = [(s.model, c.design, c.same_ids) for s in studies for c in s.curves if c.same_ids < max(s.lengths)]
    told = [f"{model}: {design} differs from {UNCACHED} after {n} tokens" for model, design, n in differ]
    return told * (dtype == torch.float32) + (sorting.failures if sorting else [])


if __name__ == "__main__":
    sys.exit(main())
