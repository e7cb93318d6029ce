"""Draw what a command measured: the times of eval.speedup, or the loss and the held-out scores of a training run.

python -m eval.speedup --json > speedup.json
python docs/images/plots.py speedup.json docs/images/speedup.png    # extra: eval
python docs/images/plots.py out/mine/metrics.jsonl docs/images/training.png
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_speedup(results: dict, path: str) -> None:
    """Milliseconds by new tokens, one line a design of the model's own study; both axes are logarithmic."""
    study = results["studies"][0]
    figure, axes = pyplot.subplots(figsize=(7, 4.4))
    for row in study["rows"]:
        axes.plot(study["sizes"]["lengths"], row["total_ms"], marker="o", markersize=3, label=row["design"])
    axes.set(xscale="log", yscale="log", xlabel="new tokens", ylabel="milliseconds")
    axes.set_xticks(study["sizes"]["lengths"], labels=map(str, study["sizes"]["lengths"]))
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_training(metrics: list[dict], path: str) -> None:
    """The loss of each step, and below it each score of the held-out examples."""
    scores = sorted({name for row in metrics for name in row if name.startswith("validation_")})
    figure, panels = pyplot.subplots(1, 1 + len(scores), figsize=(3.2 * (1 + len(scores)), 2.8))
    for axes, name in zip(panels, ["loss", *scores]):
        found = [(row["step"], row[name]) for row in metrics if isinstance(row.get(name), int | float)]
        axes.plot(*zip(*found), marker="" if name == "loss" else "o", markersize=3)
        axes.set(xlabel="step", title=name.replace("_", " "))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(source: str, path: str) -> None:
    text = Path(source).read_text(encoding="utf-8")
    if source.endswith(".jsonl"):
        draw_training([json.loads(line) for line in text.splitlines()], path)
    else:
        draw_speedup(json.loads(text), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
