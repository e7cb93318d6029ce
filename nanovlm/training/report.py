"""report.png: the curves of a run, and what the model said of held-out pictures before it and after it."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from PIL import Image

from nanovlm.training.metrics import METRICS, entries

SMOOTHED = 20  # steps: the loss of one depends on what it happened to draw
COLUMNS = 4


def write_report(folder: Path, pictures: Sequence[Image.Image] = ()) -> Path:
    """Draw folder/metrics.jsonl as folder/report.png, and pictures with the first and the last captions it holds.

    Needs matplotlib, extra `eval`.
    """
    from matplotlib.figure import Figure

    told = entries(folder / METRICS)
    captions = [entry["captions"] for entry in told if "captions" in entry]
    rows = -(-len(pictures) // COLUMNS) if captions else 0
    figure = Figure(figsize=(12, 3.2 + 3.6 * rows), layout="constrained")
    above, *below = figure.subfigures(
        2 if rows else 1, 1, squeeze=False, height_ratios=[3.2, 3.6 * rows][: 1 + bool(rows)]
    )[:, 0]
    left, middle, right = above.subplots(1, 3)
    steps = [entry for entry in told if "loss" in entry]
    at, losses = [entry["step"] for entry in steps], [entry["loss"] for entry in steps]
    left.plot(at, losses, alpha=0.3, color="C0")
    means = [losses[max(0, i - SMOOTHED + 1) : i + 1] for i in range(len(losses))]
    left.plot(at, [sum(some) / len(some) for some in means], color="C0", label=f"training, mean of {SMOOTHED} steps")
    held_out = [(entry["step"], entry["validation_loss"]) for entry in told if "validation_loss" in entry]
    if held_out:
        left.plot(*zip(*held_out), color="C1", marker="o", label="validation")
    left.legend()
    left.set(title="loss", xlabel="step", yscale="log")
    middle.plot(at, [entry["lr"] for entry in steps])
    middle.set(title="learning rate", xlabel="step")
    right.plot(at, [float("nan") if entry["grad_norm"] is None else entry["grad_norm"] for entry in steps])
    right.set(title="gradient norm", xlabel="step", yscale="log")
    for sheet in below:
        places = list(sheet.subplots(rows, COLUMNS, squeeze=False).flat)
        for place in places:
            place.set_axis_off()
        for place, picture, before, after in zip(places, pictures, captions[0], captions[-1]):
            place.imshow(picture.convert("RGB"))
            place.set_title(f"{fill(f'before: {before}', 38)}\n{fill(f'after: {after}', 38)}", fontsize=8, loc="left")
    figure.savefig(path := folder / "report.png", dpi=100)
    return path
