"""The cost of each precision: predictions at every level of the CPU's instructions, beside float32 by plain modules."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.lib.command import at_level, levels_here, progress, relative_error
from nanovlm.captioner import Captioner
from nanovlm.console import table

COMPARED = [(dtype, quantize) for quantize in (None, "int8", "int4") for dtype in ("float32", "bfloat16")]
COLUMNS = {
    "perplexity": ".3f",
    "right": ".1%",
    "kept": ".1%",
    "same": ".1%",
    "kl": ".5f",
    "error": ".2%",
    "encoder": ".2%",
}

Rows = dict[str, dict[str, float]]  # figures by what was compared, of which the first is the reference


class Predictions(NamedTuple):
    """An answer to each example, a text or a token's id, and of all or some examples the logits (n, V)."""

    answers: Sequence[Any]
    logits: Tensor
    encoded: Tensor | None = None  # embeddings of some images


def in_every_precision(
    folder: Path | str, predict: Callable[[Captioner], Predictions], levels: Sequence[str] = ()
) -> dict[str, Callable[[], Predictions]]:
    """Calls of predict by dtype, quantization and level, by default all levels here; the reference is the first."""
    levels = levels or levels_here() or ["none"]

    def call(dtype: str, quantize: str | None, level: str) -> Predictions:
        with at_level(level):
            captioner = Captioner.from_pretrained(folder, "cpu", dtype, quantize=quantize)
        return predict(captioner)

    ways = [("float32", None, "none"), *((*precision, level) for precision in COMPARED for level in levels)]
    return {" ".join(filter(None, way)): partial(call, *way) for way in ways}


@torch.inference_mode()
def compare(contestants: Mapping[str, Callable[[], Predictions]], truths: Sequence[Any]) -> Rows:
    """Figures of all predictions, relative to those of the first.

    "right" is the share of answers that are the truths, "kept" that of the reference's right answers which stay right,
    "same" that of answers which are the reference's. "kl" is the mean Kullback-Leibler divergence of the predictions
    from the reference's in nats, "error" their root mean square difference over the reference's standard deviation,
    "encoder" that of images' embeddings. Where truths are tokens, "perplexity" is exp of the mean negative
    log-probability of these.
    """
    rows: Rows = {}
    reference = None
    for name, predict in contestants.items():
        progress(name)
        found = predict()
        reference = reference or found
        right, was_right = ([a == b for a, b in zip(one.answers, truths)] for one in (found, reference))
        pairs = zip(found.logits.log_softmax(-1), reference.logits.log_softmax(-1))
        divergences = [F.kl_div(*pair, reduction="sum", log_target=True).item() for pair in pairs]
        rows[name] = {
            "right": fmean(right),
            "kept": sum(map(min, right, was_right)) / sum(was_right) if any(was_right) else 1.0,
            "same": fmean(a == b for a, b in zip(found.answers, reference.answers)),
            "kl": max(0.0, fmean(divergences)),
            "error": relative_error(found.logits, reference.logits),
        }
        if found.encoded is not None and reference.encoded is not None:
            rows[name]["encoder"] = relative_error(found.encoded, reference.encoded)
        if isinstance(truths[0], int):
            rows[name]["perplexity"] = math.exp(F.cross_entropy(found.logits, torch.tensor(truths)).item())
    return rows


def comparison_table(rows: Rows) -> str:
    columns = {name: form for name, form in COLUMNS.items() if name in next(iter(rows.values()))}
    cells = [[name, *(f"{row[column]:{form}}" for column, form in columns.items())] for name, row in rows.items()]
    return table([["", *columns], *cells])
