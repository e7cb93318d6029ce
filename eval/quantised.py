"""What lower precision costs: how many of float32's right captions stay exact, and how far logits move.

    python -m eval.quantised

The embedded model captions fresh scenes in float32, in bfloat16, and with its language model's weights in int8. "kept"
is the share of the captions that float32 has right and the other has, too; "logits" the root mean square of the
difference at the first word, as a share of their spread. It fails if int8 keeps less than 99%.
"""

import sys
from collections.abc import Sequence
from random import Random

import torch

from eval.captions import png
from eval.lib.command import make_parser, positive, report
from eval.lib.hardware import environment
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.synthetic import caption, random_scene

WAYS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None)}
WAYS |= {f"{name}, int8": (name, "int8") for name in WAYS}
LEAST, BATCH = 0.99, 64


def measure(n: int, seed: str, model: str = EMBEDDED) -> dict[str, dict[str, float]]:
    rng = Random(f"quantised {seed}")
    scenes = [random_scene(rng) for _ in range(n)]
    pictures, truths, found = [png(scene, rng) for scene in scenes], [caption(scene) for scene in scenes], {}
    for way, (dtype, quantize) in WAYS.items():
        captioner = Captioner.from_pretrained(model, "cpu", dtype, quantize=quantize)
        said = captioner.captions(pictures, batch_size=BATCH)
        right = [answer == truth for answer, truth in zip(said, truths)]
        inputs = captioner.processor.batch([captioner.prepare(picture) for picture in pictures[:BATCH]])
        with torch.inference_mode():
            logits = captioner.model.prefill(**inputs)[0].float()
        exact, reference = found.setdefault("exact", (right, logits))
        of = sum(exact)
        found[way] = {
            "right": sum(right) / n,
            "kept": sum(a and b for a, b in zip(right, exact)) / of if of else 0.0,
            "logits": float((logits - reference).square().mean().sqrt() / reference.std()),
        }
    del found["exact"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("quantised", __doc__)
    parser.add_argument("--scenes", type=positive, default=1000, metavar="N", help="fresh scenes (1000)")
    parser.add_argument("--seed", default="1", help="which (1)")
    args = parser.parse_args(argv)
    found = measure(args.scenes, args.seed)
    lines = [f"{'':16}{'right':>8}{'kept':>8}{'logits':>9}"]
    for way, shares in found.items():
        lines.append(f"{way:16}{shares['right']:>8.1%}{shares['kept']:>8.1%}{shares['logits']:>9.2%}")
    lost = [way for way in found if way.endswith("int8") and found[way]["kept"] < LEAST]
    failures = [f"{way} keeps less than {LEAST:.0%} of float32's right captions" for way in lost]
    return report(found, "\n".join(lines), environment(), args.json, failures)


if __name__ == "__main__":
    sys.exit(main())
