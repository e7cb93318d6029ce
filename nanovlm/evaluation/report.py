"""report.html: one self-contained page with a run's curves, what was mistaken for what, and a gallery of answers."""

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

from models.common import files
from nanovlm.console import CONTROL, count
from nanovlm.data.examples import Question
from nanovlm.evaluation.evaluate import Answer, Evaluation
from nanovlm.evaluation.labels import Doubt
from nanovlm.processing.image_loading import thumbnail

MAX_SHOWN = 60  # wrong answers, and right ones
MAX_ANSWERS = 40  # different ones, for a table of what was mistaken for what
SIDE = 128  # of a thumbnail: some 3 kB
QUALITY = 60
WIDTH = 480  # of a chart
HEIGHT = 160
STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem}
.wide{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.2em .5em;text-align:right;font-weight:normal}
.right{background:#2a82}.mistake{background:#d428;font-weight:bold}svg{width:100%;max-width:30rem;overflow:visible}
svg *{fill:none;stroke:currentColor}svg text{font-size:12px;fill:currentColor;stroke:none}
article{display:flex;gap:1em;padding:.5em 0;border-top:1px solid #8888;content-visibility:auto;
contain-intrinsic-size:auto 9em}article img{flex:none;width:128px;object-fit:contain}
article p{margin:0;overflow-wrap:anywhere}article small{opacity:.7}"""

Points = Sequence[tuple[float, float]]


def write_report(
    path: Path,
    title: str,
    evaluation: Evaluation,
    metric: str = "f1",
    metrics: Sequence[Mapping[str, Any]] = (),
    facts: Sequence[str] = (),
    best: int | None = None,
    doubts: Sequence[Doubt] = (),
) -> None:
    """Write the page. metrics are the objects of a metrics.jsonl, of which loss and one metric are drawn.

    best is the step of the model, which is marked in the curves; doubts are those of `doubtful_labels`.
    """
    sections = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts)]
    lines = {"loss": _points(metrics, "loss"), "held out": _points(metrics, "validation_loss")}
    sections += [_chart("loss", lines, best)] if lines["loss"] else []
    curve = _points(metrics, f"validation_{metric}") if metric != "loss" else []
    sections += [_chart(f"{metric} of held-out answers", {metric: curve}, best)] if curve else []
    sections.append(_confusion(evaluation.answers))
    if doubts:
        told = [f"{one.label} (probability {one.probability:.2g}), the model's: {one.better}" for one in doubts]
        sections.append("<h2>Your label against the model's, the least probable first</h2>")
        sections.append(_gallery((one.question, line) for one, line in zip(doubts[:MAX_SHOWN], told)))
    right = [answer for answer in evaluation.answers if answer.is_right]
    for kind, answers in (("Wrong", evaluation.wrong()), ("Right", right)):
        shown = f", the first {MAX_SHOWN}" if len(answers) > MAX_SHOWN else ""
        sections.append(f"<h2>{kind}: {len(answers):,} of {count(len(evaluation.answers), 'answer')}{shown}</h2>")
        sections.append(_gallery((answer.question, f"answer: {answer.text}") for answer in answers[:MAX_SHOWN]))
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
    head += f'<meta name=viewport content="width=device-width"><style>{STYLE}</style>'
    page = CONTROL.sub("\N{REPLACEMENT CHARACTER}", "\n".join([head, *sections, "</html>\n"]))
    files.replace(path, page.encode(errors="replace"))  # names may hold bytes that are not Unicode


def _gallery(shown: Iterable[tuple[Question, str]]) -> str:
    """Articles, one for each question: its image, a line, and below it references, prompt and file."""
    articles = []
    shown = list(shown)
    with ThreadPoolExecutor() as threads:
        images = threads.map(_img, [next(iter(question.images), None) for question, _ in shown])
        for (question, line), image in zip(shown, images):
            parts = (f"reference: {' | '.join(question.references)}", question.prompt, question.name)
            below = escape(" \N{MIDDLE DOT} ".join(parts))
            articles.append(f"<article>{image}<p>{escape(line)}<br><small>{below}</small></p></article>")
    return "\n".join(articles)


def _img(source: Any) -> str:
    """An img element that holds the image itself; empty if it cannot be read."""
    try:
        data = base64.b64encode(thumbnail(source, SIDE, QUALITY)).decode()
    except Exception:
        return ""
    return f'<img alt="" src="data:image/jpeg;base64,{data}">'


def _confusion(answers: Sequence[Answer]) -> str:
    """A table of how often each reference got each answer, if there are few different ones; else nothing."""
    counts = Counter((answer.question.references[0].strip(), answer.text.strip()) for answer in answers)
    truths = sorted({truth for truth, _ in counts})
    if not 2 <= len(truths) <= MAX_ANSWERS or len(truths) == len(answers):
        return ""
    rows = []
    for truth in truths:
        cells = [_cell(counts[truth, text], text == truth) for text in truths]
        cells.append(
            _cell(sum(n for (wanted, text), n in counts.items() if wanted == truth and text not in truths), False)
        )
        rows.append(f"<tr><th>{escape(truth)}</th>{''.join(cells)}</tr>")
    names = "".join(f"<th>{escape(text)}</th>" for text in [*truths, "others"])
    table = f"<table><tr><th></th>{names}</tr>{''.join(rows)}</table>"
    return f'<h2>What was taken for what</h2><p>Rows: references. Columns: answers.</p><div class="wide">{table}</div>'


def _cell(n: int, is_right: bool) -> str:
    return f'<td class="{"right" if is_right else "mistake"}">{n:,}</td>' if n else "<td></td>"


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(entry["step"], entry[name]) for entry in metrics if entry.get(name) is not None]


def _chart(title: str, lines: Mapping[str, Points], best: int | None) -> str:
    """An SVG of lines over steps, the first one thin, with a dashed line at the best step."""
    xs, ys = zip(*(point for points in lines.values() for point in points))
    high = max(*ys, 1e-9)
    last = max(*xs, 1)
    parts = [f'<text y="-6">{escape(title)}, up to {high:.3g}; {last:,} steps</text>']
    parts.append(f'<path d="M0 {HEIGHT}H{WIDTH}" opacity=".3"/>')
    if best is not None:
        parts.append(f'<path d="M{WIDTH * best / last:.1f} 0V{HEIGHT}" stroke-dasharray="4"/>')
    for i, points in enumerate(lines.values()):
        places = " ".join(f"{WIDTH * x / last:.1f},{HEIGHT * (1 - y / high):.1f}" for x, y in points)
        parts.append(f'<polyline points="{places}" stroke-width="{1 + i}"/>')
    return f'<p><svg viewBox="0 -20 {WIDTH} {HEIGHT + 24}" role="img">{"".join(parts)}</svg></p>'
