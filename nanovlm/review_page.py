"""A page to review captions: one HTML file with thumbnails, texts and a filter, which needs no network."""

import base64
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

from nanovlm.processing.image_loading import load_image

SIDE = 128  # of a thumbnail: some 3 kB
QUALITY = 60
NOTES = ["empty", "repeated", "cut", "identical", ""]  # the first word of a caption's mark, in the order of the page
GALLERY_STYLE = """:root{color-scheme:light dark}
article{display:flex;gap:1em;padding:.5em 0;border-top:1px solid #8888;content-visibility:auto;
contain-intrinsic-size:auto 9em}article[hidden]{display:none}article img{flex:none;width:128px;object-fit:contain}
article p{margin:0;overflow-wrap:anywhere}article small{opacity:.7}article b{color:light-dark(#a00,#f98)}"""
PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body{{font:15px system-ui,sans-serif;margin:1em auto;max-width:60em;padding:0 1em}}
input{{font:inherit;width:100%;padding:.4em;box-sizing:border-box}}{style}</style>
<h1>{title}</h1><p>{summary}</p><input placeholder="filter by words of a caption or a name" autofocus>
<p id="found"></p>{rows}
<script>
const rows = [...document.querySelectorAll("article")], input = document.querySelector("input");
input.oninput = () => {{
  const words = input.value.toLowerCase();
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(words);
  document.querySelector("#found").textContent = rows.filter(row => !row.hidden).length + " of " + rows.length;
}};
input.oninput();
</script>
"""


def gallery(rows: Iterable[tuple[Any, str, str, str]]) -> str:
    """HTML of rows, to be styled by GALLERY_STYLE: an image, a text, its name or reference, and a mark such as wrong.

    An image that cannot be read has no thumbnail.
    """
    rows = list(rows)
    with ThreadPoolExecutor() as threads:
        images = threads.map(thumbnail, [row[0] for row in rows])
        bold = [f"<b>{escape(mark)}</b> " if mark else "" for *_, mark in rows]
        return "\n".join(
            f"<article>{image}<p>{mark}{escape(text)}<br><small>{escape(name)}</small></p></article>"
            for image, mark, (_, text, name, _) in zip(images, bold, rows)
        )


def thumbnail(source: Any) -> str:
    """An img element that holds the image itself; empty if it cannot be read."""
    try:
        small = load_image(source, side=SIDE).copy()
    except Exception:
        return ""
    small.thumbnail((SIDE, SIDE))
    small.save(file := io.BytesIO(), "JPEG", quality=QUALITY)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">'


def write_page(
    path: str, images: Sequence[str], captions: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> None:
    """Write the page; images without a caption come first, then captions that repeat themselves or each other."""
    texts = [str(row.get("text", "")) for row in captions]
    counts = Counter(texts)
    rows = [
        (name, text or failed.get(name, ""), name, _note(text, row, counts[text]))
        for name, text, row in zip(images, texts, captions)
    ]
    kind = lambda row: row[3].partition(" ")[0]  # noqa: E731
    rows.sort(key=lambda row: (NOTES.index(kind(row)), row[1] if row[3] else ""))
    kinds = Counter(map(kind, rows))
    summary = f"{len(rows):,} images" + "".join(f"; {n:,} {note}" for note, n in kinds.items() if note)
    title = escape(f"Captions of {os.path.commonpath(map(os.path.abspath, images)) if images else 'nothing'}")
    page = PAGE.format(title=title, summary=summary, style=GALLERY_STYLE, rows=gallery(rows))
    Path(path).write_text(page, "utf-8", "replace")


def _note(text: str, row: Mapping[str, Any], n: int) -> str:
    """Rows that a reviewer looks at first."""
    words = text.lower().split()
    if not words:
        return "empty"
    if row.get("finish_reason") == "repetition" or (len(words) >= 12 and len(set(words)) < len(words) / 3):
        return "repeated"
    if row.get("finish_reason") == "length":
        return "cut"
    return f"identical to {n - 1:,} others" if n > 1 and "probability" not in row else ""
