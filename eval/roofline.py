"""How near each stage of a caption is to what the machine allows.

    python -m eval.roofline --shape 230M

A stage takes at least as long as it takes to read its weights once, and to do its floating-point operations at the
speed of a large product of matrices; both speeds are measured first, at their best. The model has random weights and
runs as `Captioner.from_pretrained` gives it on this CPU; decoding is compiled if the package is in the cache, where
eval.peers and `nanovlm compile` put it. torch's FlopCounterMode counts the operations of the plain modules; times are
medians.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from eval.lib.command import make_parser, positive, report
from eval.lib.hardware import environment, matmul_flops, memory_bandwidth
from eval.lib.shapes import SHAPES
from models.inference.inference_model import make_fast
from models.vision_language_model import PrefillState, VisionLanguageModel
from nanovlm.device import DTYPES, choose_dtype

WORDS = 16  # of the prompt, after the image


@dataclass(frozen=True)
class Stage:
    """Bytes of weights to read, floating-point operations to do, and the seconds that it takes, the median."""

    name: str
    weight_bytes: int
    flops: int
    seconds: float


def stages(model: VisionLanguageModel, images: Tensor) -> dict[str, tuple[nn.Module, Callable[[], object]]]:
    """Name -> whose weights are read, and the call; for a model of one tile, on any device, meta too."""
    decoder, cfg = model.decoder, model.cfg
    x = torch.zeros(1, cfg.mp_image_token_length + WORDS, cfg.lm_hidden_dim, dtype=images.dtype, device=images.device)
    ids = torch.ones(1, dtype=torch.long, device=images.device)
    prefix = PrefillState(decoder(x)[1])
    sees = nn.ModuleList([model.vision_encoder, model.MP])
    return {
        "see one tile": (sees, lambda: model.MP(model.vision_encoder(images))),
        f"read {x.size(1)} tokens": (decoder, lambda: decoder.head(decoder(x)[0][:, -1])),
        "say one token": (decoder, lambda: model.decode(ids, prefix)),
    }


def measure(shape: str, dtype: torch.dtype, rounds: int) -> list[Stage]:
    cfg = SHAPES[shape][0]
    with torch.device("meta"):
        plain = VisionLanguageModel(cfg, -1).to(dtype).eval()
    model = make_fast(VisionLanguageModel(cfg, -1).to(dtype).eval())
    images = torch.rand(1, 3, cfg.vit_img_size, cfg.vit_img_size).to(dtype)
    found = []
    with torch.inference_mode():
        counted = stages(plain, images.to("meta"))
        for name, (module, run) in stages(model, images).items():
            with FlopCounterMode(display=False) as counter:
                counted[name][1]()
            times = []
            for _ in range(rounds + 1):
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            size = sum(p.numel() * p.element_size() for p in module.parameters())  # a head that is the embedding: once
            found.append(Stage(name, size, counter.get_total_flops(), statistics.median(times[1:])))
    return found


def table(found: list[Stage], dtype: torch.dtype) -> str:
    line = "{:18}{:>9}{:>11}{:>9}{:>11}{:>9}{:>9}".format
    lines = [line("", "MB", "at least", "GFLOP", "at least", "takes", "reaches")]
    for stage in found:
        reads, computes = stage.weight_bytes / memory_bandwidth(), stage.flops / matmul_flops(dtype)
        times = (f"{1000 * seconds:.1f} ms" for seconds in (reads, computes, stage.seconds))
        a, b, c = times
        share = f"{max(reads, computes) / stage.seconds:.0%}"
        lines.append(line(stage.name, f"{stage.weight_bytes / 1e6:.0f}", a, f"{stage.flops / 1e9:.1f}", b, c, share))
    lines.append(f"memory {memory_bandwidth() / 1e9:.1f} GB/s, products {matmul_flops(dtype) / 1e9:.0f} GFLOP/s")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("roofline", __doc__)
    parser.add_argument("--shape", default="230M", choices=tuple(SHAPES), help="(230M)")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="(auto: bfloat16 where faster)")
    parser.add_argument("--rounds", type=positive, default=9, metavar="N", help="(9)")
    args = parser.parse_args(argv)
    dtype = choose_dtype(args.dtype, torch.device("cpu"))
    found = measure(args.shape, dtype, args.rounds)
    limits = {"memory_bandwidth": memory_bandwidth(), "matmul_flops": matmul_flops(dtype)}
    told = limits | {"stages": [asdict(stage) for stage in found]}
    return report(told, table(found, dtype), environment(dtype=dtype), args.json)


if __name__ == "__main__":
    sys.exit(main())
