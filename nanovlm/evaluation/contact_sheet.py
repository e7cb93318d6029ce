"""An image of the worst answers: image, prompt, answer and references of each."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

from nanovlm.errors import MissingExtraError
from nanovlm.evaluation.evaluate import Answer
from nanovlm.processing.image_loading import load_image

COLUMNS = 4
CELL_WIDTH, CELL_HEIGHT = 3.2, 4.6  # inches
LINE, MAX_TEXT = 50, 140  # characters


def write_contact_sheet(path: Path, answers: Sequence[Answer]) -> None:
    """Draw the answers, in rows of at most COLUMNS. Needs matplotlib (extra: eval)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(f"{path} needs matplotlib: pip install 'nanovlm[eval]'") from None
    columns = max(1, min(COLUMNS, len(answers)))
    rows = max(1, -(-len(answers) // columns))
    figure: Any = Figure(figsize=(CELL_WIDTH * columns, CELL_HEIGHT * rows), layout="constrained")
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in cells:
        axes.set_axis_off()
    for axes, answer in zip(cells, answers):
        if answer.question.images:
            axes.imshow(load_image(answer.question.images[0]))
        axes.set_title(describe(answer), fontsize=7, loc="left", parse_math=False)
    figure.savefig(path, dpi=100, bbox_inches="tight")  # a long text in the first row would be cut off


def describe(answer: Answer) -> str:
    """Prompt, answer, references and scores, each on lines of its own."""
    scores = ", ".join(f"{name} {value:.2f}" for name, value in answer.scores.items())
    references = " | ".join(answer.question.references)
    texts = {"question": answer.question.prompt, "answer": answer.text, "reference": references}
    lines = [line for kind, text in texts.items() for line in wrap(shorten(f"{kind}: {text}", MAX_TEXT), LINE)]
    return "\n".join([*lines, *wrap(scores, LINE)])
