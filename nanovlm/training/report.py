"""report.png: the curves of a run, and captions of held-out images before and after it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from PIL import Image

from nanovlm.training.metrics import METRICS, read_metrics

SMOOTHING = 20  # steps; the loss of a single step depends on its batch
COLUMNS = 4
CURVES_HEIGHT, ROW_HEIGHT, WIDTH = 3.2, 3.6, 12  # inches

logger = logging.getLogger(__name__)


def try_report(folder: Path, images: Sequence[Image.Image]) -> None:
    """Write the report; a warning says why it cannot be written, for the model is written and the run a success."""
    try:
        write_report(folder, images)
    except ImportError as error:
        logger.warning(f"no report.png: {error}; pip install 'nanovlm[eval]'")
    except OSError as error:
        logger.warning(f"no report.png: {error}")


def write_report(folder: Path, images: Sequence[Image.Image] = ()) -> Path:
    """Plot folder/metrics.jsonl as folder/report.png, with the images and their first and last captions in it.

    Needs matplotlib (extra: eval).
    """
    from matplotlib.figure import Figure

    metrics = read_metrics(folder / METRICS)
    captions = [entry["captions"] for entry in metrics if "captions" in entry]
    rows = -(-len(images) // COLUMNS) if captions else 0
    figure: Any = Figure(figsize=(WIDTH, CURVES_HEIGHT + ROW_HEIGHT * rows), layout="constrained")
    if rows:
        above, below = figure.subfigures(2, 1, height_ratios=[CURVES_HEIGHT, ROW_HEIGHT * rows])
        plot_captions(below, rows, images, captions[0], captions[-1])
    else:
        above = figure.subfigures(1, 1)
    plot_curves(above, metrics)
    path = folder / "report.png"
    figure.savefig(path, dpi=100)
    return path


def plot_curves(figure: Any, metrics: Sequence[dict[str, Any]]) -> None:
    """Loss, learning rate and gradient norm, side by side."""
    loss_axes, lr_axes, norm_axes = figure.subplots(1, 3)
    entries = [entry for entry in metrics if "loss" in entry]
    steps, losses = [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
    loss_axes.plot(steps, losses, alpha=0.3, color="C0")
    windows = [losses[max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(losses))]
    means = [sum(window) / len(window) for window in windows]
    loss_axes.plot(steps, means, color="C0", label=f"training, mean of {SMOOTHING} steps")
    validation = [(entry["step"], entry["validation_loss"]) for entry in metrics if "validation_loss" in entry]
    if validation:
        loss_axes.plot(*zip(*validation), color="C1", marker="o", label="validation")
    loss_axes.legend()
    loss_axes.set(title="loss", xlabel="step", yscale="log")
    lr_axes.plot(steps, [entry["lr"] for entry in entries])
    lr_axes.set(title="learning rate", xlabel="step")
    norms = [float("nan") if entry["grad_norm"] is None else entry["grad_norm"] for entry in entries]
    norm_axes.plot(steps, norms)
    norm_axes.set(title="gradient norm", xlabel="step", yscale="log")


def plot_captions(
    figure: Any, rows: int, images: Sequence[Image.Image], first: Sequence[str], last: Sequence[str]
) -> None:
    """The images in a grid, each under its first and its last caption."""
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in grid:
        axes.set_axis_off()
    for axes, image, before, after in zip(grid, images, first, last):
        axes.imshow(image.convert("RGB"))
        axes.set_title(f"{fill(f'before: {before}', 38)}\n{fill(f'after: {after}', 38)}", fontsize=8, loc="left")
