"""`nanovlm review`: a page to look at the captions of images beside the pictures, and to change them."""

import asyncio
import functools
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from models.files import FileError
from nanovlm.bulk import Report, caption_rows, extensions, find_images
from nanovlm.errors import ImageError, NanoVLMError, UsageError
from nanovlm.options import CaptionOptions, with_changes
from nanovlm.outputs import EDITED, MADE, Output, Row, Sidecars, Table, edited, reasons, text_hash
from nanovlm.processing.image_loading import thumbnail
from nanovlm.serving.app import Gate, read_body
from nanovlm.serving.openai_api import APIError
from nanovlm.serving.options import ServeOptions

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

PAGE = Path(__file__).parent / "review_page"
THUMBNAIL, LARGE = 256, 1600  # longest sides
QUALITY = 80
N_THUMBNAILS = 4_000  # that are kept, some 10 kB each
IMPROBABLE = 0.7  # a label's probability, below which a person should look
MAX_UNDO = 50
Change = tuple[int, Row, str]  # an image's number, its row before or to be, and the version of the text after or before

logger = logging.getLogger(__name__)


class Review:
    """The captions of some images: listed, marked, changed through the output of a caption run, and undone.

    target is a folder, with text files of this extension, or a table. Each change locks what it writes, reads it anew,
    and is refused where the text is not the one that the page has.
    """

    def __init__(
        self,
        target: str,
        extension: str = ".txt",
        load: "Callable[[], Captioner] | None" = None,
        options: CaptionOptions | None = None,
        model: str = "",
    ):
        self.target = target
        self.extension = extension
        self.load = functools.cache(load) if load else None
        self.options = options or CaptionOptions()
        self.model = model
        self.changes: list[list[Change]] = []
        self.writing = threading.Lock()
        self.captioning = threading.Lock()
        self.decoders = threading.BoundedSemaphore(os.cpu_count() or 1)  # a picture takes much memory
        self.thumbnail = functools.lru_cache(N_THUMBNAILS)(self._thumbnail)
        output = self.output()
        if isinstance(output, Table):
            self.folder = os.path.dirname(target) or "."
            rows = (output.rows | output.failures.rows).values()
            images = [os.path.join(self.folder, row["file_name"]) for row in rows]
            self.images = [image for image in images if output.made(image) or os.path.exists(image)]
        else:
            self.folder = target
            report = Report()
            find_images([target], extensions(self.options), report)
            self.images = report.images
        if not self.images:
            raise UsageError(f"{target} has no images; name a folder of images, or a .jsonl table")

    def output(self) -> Sidecars | Table:
        """The captions as they are now."""
        if os.path.isdir(self.target):
            return Sidecars(self.extension)
        table = Table(self.target)
        table.check()
        table.read()
        return table

    def listing(self) -> list[dict[str, Any]]:
        output = self.output()
        return [self._state(output, number) for number in range(len(self.images))]

    def _state(self, output: Output, number: int) -> dict[str, Any]:
        image = self.images[number]
        problem = output.refusal(image)
        row: Row = {}
        try:
            row = {} if problem else output.row(image)
            problem = problem or (not row and output.failure(image)) or ""
        except FileError as error:
            problem = str(error)
        text = str(row.get("text", ""))
        name = os.path.relpath(image, self.folder)
        made = ", ".join(f"{key} {row[key]!r}" for key in ("model", "prompt", "prefix", "choices") if row.get(key))
        shown = {"name": name, "folder": os.path.dirname(name), "text": text, "made": made, "problem": problem}
        shown = {key: value.encode("utf-8", "backslashreplace").decode() for key, value in shown.items()}
        more = {"version": text_hash(text), "marks": marks(row), "is_label": bool(row.get("choices"))}
        return {"id": number} | shown | more

    def change(self, wanted: list[tuple[int, str, str]], is_replaced: bool = False) -> list[dict[str, Any]]:
        """Write texts that a person typed, or replaced words of, if the page has their versions; returns states."""
        changes: list[Change] = [(number, {"text": text.strip()}, version) for number, text, version in wanted]
        return self._write(changes, functools.partial(edited, is_replaced=is_replaced))

    def again(self, number: int, prompt: str, version: str) -> list[dict[str, Any]]:
        """Caption an image again by a prompt, with the prefix that its caption has; returns its state."""
        if self.load is None:
            raise UsageError("no model to caption with; start the page with --model")
        image = self.images[number]
        output = self.output()
        prefix = (output.made(image) or output.record(image).made(image)).get("prefix", "")
        options = with_changes(self.options, {"prompts": (prompt,), "prefix": prefix})
        with self.captioning:
            (row,) = caption_rows(self.load(), [(image, image)], options)
            if isinstance(row, Exception):
                raise row if isinstance(row, NanoVLMError) else ImageError(f"{image}: {row}")
        origin = {"model": self.model, "prompt": options.filled(prompt, image), "prefix": prefix}
        row |= {name: value for name, value in origin.items() if value}
        return self._write([(number, row, version)])

    def undo(self) -> list[dict[str, Any]]:
        """Put the rows before the last change back, where nothing changed since; returns the states now."""
        return self._write(self.changes.pop(), is_undo=True) if self.changes else []

    def _write(
        self, rows: list[Change], edit: Callable[[Row, str], Row] | None = None, is_undo: bool = False
    ) -> list[dict[str, Any]]:
        """Write rows, or those that edit makes of old ones and texts, where the texts have the versions given."""
        with self.writing:
            output = self.output()
            output.overwrite = "all"
            todo = []
            conflicts = set()
            with output.opened([self.folder]), ThreadPoolExecutor(output.n_writers) as threads:
                for number, row, version in rows:
                    image = self.images[number]
                    if reason := output.refusal(image):
                        raise UsageError(f"{image}: {reason}")
                    old = output.row(image)
                    if text_hash(str(old.get("text", ""))) == version:
                        row = edit(old or output.made(image), row["text"]) if edit else row
                        todo.append((number, row, {"text": ""} | {name: old[name] for name in MADE if name in old}))
                    else:
                        conflicts.add(number)
                written = [threads.submit(output.write, self.images[number], row) for number, row, _ in todo]
            done = [
                (number, old, text_hash(str(row["text"])))
                for (number, row, old), future in zip(todo, written)
                if future.exception() is None
            ]
            if done and not is_undo:
                self.changes = [*self.changes, done][-MAX_UNDO:]
            for future in written:
                future.result()  # raises its error
            output = self.output()
            return [self._state(output, number) | {"conflict": number in conflicts} for number, *_ in rows]

    def _thumbnail(self, number: int, side: int, modified: int) -> bytes:
        """JPEG of an image as the model sees it. ImageError if it cannot be read."""
        with self.decoders:
            return thumbnail(self.images[number], side, QUALITY)

    def picture(self, number: int, side: int) -> bytes:
        try:
            modified = os.stat(self.images[number]).st_mtime_ns
        except (OSError, ValueError) as error:
            raise ImageError(f"{self.images[number]}: {getattr(error, 'strerror', None) or error}") from None
        make = self.thumbnail if side == THUMBNAIL else self._thumbnail
        return make(number, side, modified)


def marks(row: Row) -> list[str]:
    """What a person should look at; `identical` is for the page, which has all texts."""
    words = str(row.get("text", "")).lower().split()
    if not words:
        return ["empty"]
    ended = reasons(row)
    probability = row.get("probability", 1.0)
    found = {
        "repeated": "repetition" in ended or (len(words) >= 12 and len(set(words)) < len(words) / 3),
        "cut": "length" in ended,
        "improbable": isinstance(probability, float) and probability < IMPROBABLE,
        "edited": EDITED in ended,
    }
    return [name for name, is_found in found.items() if is_found]


def make_review_app(review: Review, token: str) -> FastAPI:
    """The page and its API below /TOKEN, which only the address that was printed holds."""
    options = ServeOptions(quiet=True)
    app = FastAPI(title="nanoVLM review", openapi_url=None)
    api = APIRouter()

    @api.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @api.get("/captions")
    def listing() -> dict[str, Any]:
        prompt = review.options.prompts[0] if review.load else None
        return {"title": review.target, "prompt": prompt, "captions": review.listing()}

    @api.get("/{kind}/{number}.jpg")
    def picture(kind: str, number: int) -> Response:
        side = {"thumbnails": THUMBNAIL, "images": LARGE}.get(kind)
        if side is None or not 0 <= number < len(review.images):
            raise APIError(404, "no such image in the list")
        return Response(review.picture(number, side), media_type="image/jpeg")

    @api.post("/captions")
    async def change(request: Request, replaced: bool = False) -> list[dict[str, Any]]:
        wanted = [read_change(item, review) for item in await read_json(request, list)]
        return await asyncio.to_thread(review.change, wanted, replaced)

    @api.post("/again")
    async def again(request: Request) -> list[dict[str, Any]]:
        body = await read_json(request, dict)
        number, prompt, version = read_change(body | {"text": body.get("prompt")}, review)
        if not prompt.strip():
            raise APIError(400, "the prompt is empty")
        return await asyncio.to_thread(review.again, number, prompt, version)

    @api.post("/undo")
    async def undo(request: Request) -> list[dict[str, Any]]:
        await read_json(request, dict)
        return await asyncio.to_thread(review.undo)

    @api.get("/review.css")
    def style() -> FileResponse:
        return FileResponse(PAGE / "review.css")

    @api.get("/review.js")
    def script() -> FileResponse:
        return FileResponse(PAGE / "review.js")

    app.include_router(api, prefix=f"/{token}")
    gated: Any = SimpleNamespace(options=options)  # no chats, whose answers the gate would release
    app.add_middleware(Gate, chats=gated)
    for kind in (NanoVLMError, APIError, Exception):
        app.add_exception_handler(kind, send_error)
    return app


async def send_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, APIError):
        if not isinstance(error, NanoVLMError):
            logger.error("a request failed", exc_info=error)
        known = isinstance(error, NanoVLMError)
        error = APIError(409, str(error)) if known else APIError(500, "a bug; the terminal shows more")
    return JSONResponse(error.body, error.status)


async def read_json(request: Request, kind: type) -> Any:
    """The body of a request of the page; other pages cannot send its type without asking."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise APIError(415, "send application/json")
    try:
        body = json.loads(await read_body(request, ServeOptions.max_body))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, kind):
        raise APIError(400, f"the body is no JSON {kind.__name__}")
    return body


def read_change(item: Any, review: Review) -> tuple[int, str, str]:
    match item:
        case {"id": int(number), "text": str(text), "version": str(version)} if 0 <= number < len(review.images):
            return number, text, version
    raise APIError(400, "a change has the id of a listed image, a text and the version that it replaces")


def serve_review(review: Review, listening_socket: socket.socket, open_browser: Callable[[str], Any]) -> None:
    """Serve the page until SIGINT or SIGTERM."""
    token = secrets.token_urlsafe(16)
    address = f"http://127.0.0.1:{listening_socket.getsockname()[1]}/{token}/"
    logger.info("%s shows %d captions; stop it with ctrl-c", address, len(review.images))
    threading.Thread(target=open_browser, args=[address], daemon=True).start()  # the page waits for the server
    config = uvicorn.Config(make_review_app(review, token), http="h11", ws="none", log_level="critical")
    uvicorn.Server(config).run(sockets=[listening_socket])
