"""report.html: one self-contained page with the curves of a training run, scores, and answers beside references."""

import base64
import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from random import Random
from typing import Any

from models.checkpoint import atomic_write
from nanovlm.console import CONTROL, count
from nanovlm.evaluation.evaluate import Answer, Evaluation
from nanovlm.processing.image_loading import load_image

SHOWN_ANSWERS = 24  # the worst ones, and as many drawn at random
THUMBNAIL = 192  # pixels
CHART_WIDTH, CHART_HEIGHT = 420, 180
SMOOTHING = 20  # steps; the loss of a single step depends on its batch
STYLE = """body{font:14px/1.4 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;
color-scheme:light dark}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}td:first-child,th:first-child{text-align:left}
.grid{display:flex;flex-wrap:wrap;gap:1em}figure{width:200px;margin:0}img{max-width:100%}figcaption{font-size:12px}
svg{overflow:visible;margin:1em 4em 1em 0}svg *{fill:none;stroke:currentColor}text{font-size:11px;stroke:none}"""
COLORS = ("#9ab8e0", "#1f5fb4", "#d9731a")

Points = Sequence[tuple[float, float]]

logger = logging.getLogger(__name__)


def write_report(
    path: Path,
    title: str,
    evaluation: Evaluation | None,
    metrics: Sequence[Mapping[str, Any]] = (),
    facts: Sequence[str] = (),
    kept_step: int | None = None,
) -> None:
    """Write the page. metrics are the objects of a metrics.jsonl; kept_step is marked in the curves."""
    sections = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
    sections += _charts(metrics, kept_step)
    if evaluation is not None and evaluation.answers:
        n, random = len(evaluation.answers), Random(0)
        drawn = random.sample(list(evaluation.answers), min(n, SHOWN_ANSWERS))
        sections += [f"<h2>Scores of {count(n, 'answer')}</h2>", _scores(evaluation)]
        sections += ["<h2>Worst answers</h2>", _figures(evaluation.worst(SHOWN_ANSWERS))]
        sections += ["<h2>Random answers</h2>", _figures(drawn)]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    page = CONTROL.sub("\N{REPLACEMENT CHARACTER}", "\n".join([head, *sections, "</html>\n"]))
    with atomic_write(path) as new:
        new.write_text(page, encoding="utf-8", errors="replace")  # names may hold bytes that are not Unicode


def _scores(evaluation: Evaluation) -> str:
    rows = [["", "questions", *evaluation.scores]]
    for group in evaluation.groups():
        name = group.source if group.prompt is None else f"– {group.prompt}"
        rows.append([name, f"{group.questions:,}", *(f"{value:.3f}" for value in group.scores.values())])
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _figures(answers: Iterable[Answer]) -> str:
    return '<div class="grid">' + "".join(map(_figure, answers)) + "</div>"


def _figure(answer: Answer) -> str:
    """An answer below its image: the file's name, the question, the references, and the scores."""
    question = answer.question
    wanted = " | ".join(question.references)
    scores = ", ".join(f"{name} {value:.2f}" for name, value in answer.scores.items())
    lines = [question.name, question.prompt, f"answer: {answer.text}", f"reference: {wanted}", scores]
    caption = "<br>".join(map(escape, lines))
    return f"<figure>{''.join(map(_thumbnail, question.images[:1]))}<figcaption>{caption}</figcaption></figure>"


def _thumbnail(source: Any) -> str:
    image = load_image(source)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "JPEG")
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _charts(metrics: Sequence[Mapping[str, Any]], kept_step: int | None) -> list[str]:
    """A chart of the loss, and one of each validation metric."""
    training = _points(metrics, "loss")
    losses = {"step": training, f"mean of {SMOOTHING}": _smooth(training)}
    losses["held out"] = _points(metrics, "validation_loss")
    names = {name for entry in metrics for name in entry if name.startswith("validation_")} - {"validation_loss"}
    charts = {"loss": losses} if training else {}
    charts |= {name: {name: points} for name in sorted(names) if (points := _points(metrics, name))}
    return [_chart(title.removeprefix("validation_"), lines, kept_step) for title, lines in charts.items()]


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(entry["step"], entry[name]) for entry in metrics if entry.get(name) is not None]


def _smooth(points: Points) -> Points:
    windows = [points[max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(points))]
    return [(window[-1][0], math.fsum(y for _, y in window) / len(window)) for window in windows]


def _chart(title: str, lines: Mapping[str, Points], kept_step: int | None) -> str:
    """An SVG of lines over steps, with a dashed line at the kept step."""
    xs, ys = zip(*(point for points in lines.values() for point in points))
    low, high, last = min(0.0, *ys), max(*ys, 1e-9), max(*xs, 1)
    parts = [_label(0, -6, title), _label(CHART_WIDTH - 50, CHART_HEIGHT + 14, f"step {last:,}")]
    parts += [_label(CHART_WIDTH + 4, 4, f"{high:.3g}"), _label(CHART_WIDTH + 4, CHART_HEIGHT, f"{low:.3g}")]
    if kept_step is not None:
        parts.append(f'<path d="M{CHART_WIDTH * kept_step / last:.1f} 0V{CHART_HEIGHT}" stroke-dasharray="4"/>')
    for i, (name, points) in enumerate(lines.items()):
        color = COLORS[i % len(COLORS)]
        places = [(CHART_WIDTH * x / last, CHART_HEIGHT * (high - y) / (high - low)) for x, y in points]
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{steps}" style="stroke:{color}"/>')
        if len(lines) > 1:
            parts.append(_label(100 * (i + 1), -6, name, color))
    return f'<svg width="{CHART_WIDTH}" height="{CHART_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, color: str = "currentColor") -> str:
    return f'<text x="{x}" y="{y}" style="fill:{color}">{escape(text)}</text>'
