"""A page to review captions: one HTML file with thumbnails, texts and a filter, which needs no network."""

import base64
import html
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from nanovlm.processing.image_loading import load_image

SIDE, QUALITY = 128, 60  # of a thumbnail: some 3 kB
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px system-ui, sans-serif; margin: 1em auto; max-width: 60em; padding: 0 1em }}
input {{ font: inherit; width: 100%; padding: .4em; box-sizing: border-box }}
article {{ display: flex; gap: 1em; min-height: 128px; padding: .5em 0; border-top: 1px solid #ccc }}
article div:first-child {{ flex: 0 0 128px }}
small {{ color: #666; overflow-wrap: anywhere }} b {{ color: #b00 }}
</style>
<h1>{title}</h1><p>{summary}</p><input placeholder="filter by words of a caption or a name" autofocus>
<p id="found"></p><main></main><footer>&nbsp;</footer>
<script type="application/json">{rows}</script>
<script>
const rows = JSON.parse(document.querySelector("script").textContent), main = document.querySelector("main");
let found = rows, drawn = 0;
const add = (parent, tag, text) => {{
  const made = parent.appendChild(document.createElement(tag)); made.textContent = text; return made;
}};
function draw() {{
  for (const row of found.slice(drawn, drawn += 50)) {{
    const article = add(main, "article", ""), left = add(article, "div", ""), right = add(article, "div", "");
    if (row.image) add(left, "img", "").src = "data:image/jpeg;base64," + row.image;
    if (row.note) add(right, "b", row.note + " ");
    add(right, "span", row.text); add(right, "br", ""); add(right, "small", row.name);
  }}
}}
function filter(words) {{
  found = rows.filter(row => (row.note + row.text + row.name).toLowerCase().includes(words.toLowerCase()));
  document.querySelector("#found").textContent = found.length + " of " + rows.length;
  drawn = 0; main.textContent = ""; draw();
}}
document.querySelector("input").oninput = event => filter(event.target.value);
new IntersectionObserver(seen => seen[0].isIntersecting && draw(), {{rootMargin: "900px"}})
  .observe(document.querySelector("footer"));
filter("");
</script>
"""


def write_page(
    path: str, images: Sequence[str], captions: Sequence[Mapping[str, Any]], failed: Mapping[str, str]
) -> None:
    """Write the page; images without a caption come first, then captions that repeat themselves or each other."""
    texts = [str(row.get("text", "")) for row in captions]
    counts = Counter(texts)
    with ThreadPoolExecutor() as threads:
        rows = [
            {"name": name, "text": text or failed.get(name, ""), "image": image, "note": _note(text, row, counts[text])}
            for name, text, row, image in zip(images, texts, captions, threads.map(_thumbnail, images))
        ]
    rows.sort(key=lambda row: (NOTES.index(row["note"].split(" ")[0]), row["text"] if row["note"] else ""))
    kinds = Counter(row["note"].split(" ")[0] for row in rows if row["note"])
    summary = f"{len(rows):,} images" + "".join(f"; {n:,} {kind}" for kind, n in kinds.items())
    data = json.dumps(rows).replace("<", "\\u003c")
    title = html.escape(f"Captions of {os.path.commonpath(map(os.path.abspath, images)) if images else 'nothing'}")
    Path(path).write_text(PAGE.format(title=title, summary=summary, rows=data), "utf-8", "replace")


NOTES = ["empty", "repeated", "cut", "identical", ""]


def _note(text: str, row: Mapping[str, Any], n: int) -> str:
    """What a reviewer looks at first."""
    if not text.strip():
        return "empty"
    words = text.lower().split()
    is_repeated = len(words) >= 12 and len(set(words)) < len(words) / 3
    if row.get("finish_reason") == "repetition" or is_repeated:
        return "repeated"
    if row.get("finish_reason") == "length":
        return "cut"
    return f"identical to {n - 1:,} others" if n > 1 and "probability" not in row else ""


def _thumbnail(path: str) -> str:
    try:
        with Image.open(path) as image:
            image.draft("RGB", (SIDE, SIDE))  # decodes a JPEG at an eighth of its size
            small = load_image(image)
            small.thumbnail((SIDE, SIDE))
    except Exception:  # it is no image that can be read, which its row says
        return ""
    small.save(file := io.BytesIO(), "JPEG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()
