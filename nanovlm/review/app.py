"""`nanovlm review`: a page to look at the captions of images beside the pictures, and to change them."""

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from models.common import files
from models.common.errors import FileError
from nanovlm.bulk import Report, caption_rows, extensions, find_images, folders_of
from nanovlm.console import count
from nanovlm.errors import ImageError, NanoVLMError, UsageError
from nanovlm.options import CaptionOptions
from nanovlm.outputs import EDITED, ORIGIN, Row, Sidecars, Table, edited, reasons, relative_name, text_hash, text_of
from nanovlm.processing.image_loading import thumbnail
from nanovlm.serving.options import ServeOptions
from nanovlm.serving.web import STATIC, APIError, Gate, Server, add_page, read_body

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

PAGE = Path(__file__).parent / "page"
SIDES = {"thumbnails": 256, "pictures": 640, "images": 1600}  # the longest sides, by the beginning of the address
QUALITY = 80
N_THUMBNAILS = 4_000  # that are kept, some 10 kB each
IMPROBABLE = 0.7  # a label's probability, below which a person should look
MAX_UNDO = 50
Wanted = tuple[int, Row, set[str]]  # an image's number, its row to be, and versions of the text that it may replace
Change = tuple[int, Row, str]  # an image's number, its row before, and the version of the text after

logger = logging.getLogger(__name__)


class Review:
    """The captions of some images: listed, marked, changed through the output of a caption run, and undone.

    target is a folder, with text files of this extension, or a table. Each change locks what it writes, looks for what
    others wrote, and is refused where the text is not one that the page has.
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
        self.load = cache(load) if load else None
        self.options = options or CaptionOptions()
        self.model = model
        self.changes: list[tuple[str, list[Change]]] = []  # with what a person calls them
        self.n_written = self.n_wanted = 0  # of the change that runs
        self.writing = threading.RLock()
        self.captioning = threading.Lock()
        self.decoders = threading.BoundedSemaphore(os.cpu_count() or 1)  # a picture takes much memory
        self.thumbnail = lru_cache(N_THUMBNAILS)(self._thumbnail)
        self.output: Sidecars | Table
        if not os.path.isdir(target):
            self.output = output = Table(target, "all")
            output.read()
            self.folder = os.path.dirname(target) or "."
            rows = (output.rows | output.failures.rows).values()
            images = [os.path.join(self.folder, row["file_name"]) for row in rows]
            self.images = [image for image in images if output.made(image) or os.path.exists(image)]
        else:
            self.output = Sidecars(extension, "all")
            self.folder = target
            report = Report()
            find_images([target], extensions(self.options), report)
            self.images = report.images
        if not self.images:
            raise UsageError(f"{target} has no images; name a folder of images, or a .jsonl table")

    def states(self, numbers: Iterable[int], conflicts: Collection[int] = ()) -> list[dict[str, Any]]:
        with self.writing:
            self.output.read()
            return [self._state(number) | {"conflict": number in conflicts} for number in numbers]

    def _state(self, number: int) -> dict[str, Any]:
        image = self.images[number]
        output = self.output
        problem = output.refusal(image)
        row: Row = {}
        try:
            row = {} if problem else output.row(image)
            problem = problem or (not row and output.failure(image)) or ""
        except FileError as error:
            problem = str(error)
        text = text_of(row)
        name = relative_name(image, self.folder)
        made = ", ".join(f"{key} {row[key]!r}" for key in ORIGIN if row.get(key))
        shown = {"name": name, "folder": os.path.dirname(name), "text": text, "made": made, "problem": problem}
        shown = {key: value.encode("utf-8", "backslashreplace").decode() for key, value in shown.items()}
        more = {"version": text_hash(text), "marks": marks(row), "is_label": bool(row.get("choices"))}
        return {"id": number} | shown | more

    def change(self, wanted: list[Wanted], is_replaced: bool = False) -> list[dict[str, Any]]:
        """Write texts that a person typed, or replaced words of, if the page has their versions; returns states."""
        return self._write("replacement" if is_replaced else "edit", wanted, partial(edited, is_replaced=is_replaced))

    def again(self, number: int, prompt: str, versions: set[str]) -> list[dict[str, Any]]:
        """Caption an image again by a prompt, with the prefix that its caption has; returns its state."""
        if self.load is None:
            raise UsageError("no model to caption with; start the page with --model")
        image = self.images[number]
        with self.writing:
            self.output.read()
            made = self.output.made(image) or self.output.record(image).made(image)
        prefix = made.get("prefix", "")
        options = replace(self.options, prompts=(prompt,), prefix=prefix)
        with self.captioning:
            (row,) = caption_rows(self.load(), [(image, image)], options)
            if isinstance(row, Exception):
                raise row if isinstance(row, NanoVLMError) else ImageError(f"{image}: {row}")
        origin = {"model": self.model, "prompt": options.filled(prompt, image), "prefix": prefix}
        row |= {name: value for name, value in origin.items() if value}
        return self._write("caption", [(number, row, versions)])

    def undo(self) -> list[dict[str, Any]]:
        """Put the rows before the last change back, where nothing changed since; returns the states now."""
        with self.writing:
            if not self.changes:
                return []
            _, last = self.changes[-1]
            states = self._write("", [(number, row, {version}) for number, row, version in last])
            del self.changes[-1]
            return states

    def status(self) -> dict[str, Any]:
        """How far a change is, and what `undo` takes back."""
        return {"done": self.n_written, "total": self.n_wanted, "undo": self.changes[-1][0] if self.changes else ""}

    def _write(
        self, what: str, wanted: list[Wanted], edit: Callable[[Row, str], Row] | None = None
    ) -> list[dict[str, Any]]:
        """Write rows, or those that edit makes of old ones and texts, where the texts have one of their versions."""
        output = self.output
        images = [self.images[number] for number, *_ in wanted]
        todo: list[tuple[Row, Change]] = []
        conflicts = set()
        self.n_written, self.n_wanted = 0, len(wanted)

        def write(image: str, row: Row) -> None:
            output.write(image, row)
            self.n_written += 1

        with self.writing, output.opened(folders_of([], images)), ThreadPoolExecutor(output.n_writers) as threads:
            for image, (number, row, versions) in zip(images, wanted):
                if reason := output.refusal(image):
                    raise UsageError(f"{image}: {reason}")
                old = output.row(image)
                version = text_hash(text_of(old))
                new = edit(old or output.made(image), row["text"]) if edit else row
                if version not in versions:
                    conflicts.add(number)
                elif edit is None or text_hash(new["text"]) != version:
                    todo.append((new, (number, output.kept(image), version)))
            writes = [threads.submit(write, self.images[change[0]], row) for row, change in todo]
            done = [(row, change) for (row, change), each in zip(todo, writes) if each.exception() is None]
            if done and what:
                self._remember(what, done)
            for each in writes:
                each.result()  # raises its error
        return self.states([number for number, *_ in wanted], conflicts)

    def _remember(self, what: str, done: list[tuple[Row, Change]]) -> None:
        """Add changes to those that `undo` takes back; what a person goes on typing is one change."""
        changes = [(number, kept, text_hash(row["text"])) for row, (number, kept, _) in done]
        number, _, before = done[0][1]
        name = relative_name(self.images[number], self.folder)
        label = f"{what} of {name if len(done) == 1 else count(len(done), 'caption')}"
        if what == "edit" and self.changes and self.changes[-1][0] == label and len(done) == 1:
            _, ((_, kept, version),) = self.changes[-1]
            if version == before:
                self.changes.pop()
                changes = [(number, kept, changes[0][2])]
        self.changes = [*self.changes, (label, changes)][-MAX_UNDO:]

    def _thumbnail(self, number: int, side: int, modified: int) -> bytes:
        """JPEG of an image as the model sees it. ImageError if it cannot be read."""
        with self.decoders:
            return thumbnail(self.images[number], side, QUALITY)

    def picture(self, number: int, side: int) -> bytes:
        modified = 0
        with suppress(OSError, ValueError):  # whose reason comes from the gate of images
            modified = os.stat(self.images[number]).st_mtime_ns
        make = self.thumbnail if side == SIDES["thumbnails"] else self._thumbnail
        return make(number, side, modified)


def marks(row: Row) -> list[str]:
    """Reasons for a person to look at a caption; the page itself finds identical ones."""
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
    app = FastAPI(title="nanoVLM review", openapi_url=None)
    api = APIRouter()

    @api.get("/captions")
    def listing() -> dict[str, Any]:
        prompt = review.options.prompts[0] if review.load else None
        captions = review.states(range(len(review.images)))
        return {"title": os.path.abspath(review.target), "prompt": prompt, "captions": captions}

    @api.get("/{kind}/{number}.jpg")
    def picture(kind: str, number: int) -> Response:
        if kind not in SIDES or not 0 <= number < len(review.images):
            raise APIError(404, "no such image in the list")
        return Response(review.picture(number, SIDES[kind]), media_type="image/jpeg")

    @api.post("/captions")
    async def change(request: Request, replaced: bool = False) -> list[dict[str, Any]]:
        wanted = [read_change(item, review) for item in await read_json(request, list)]
        return await asyncio.to_thread(review.change, wanted, replaced)

    @api.post("/again")
    async def again(request: Request) -> list[dict[str, Any]]:
        body = await read_json(request, dict)
        number, row, versions = read_change(body | {"text": body.get("prompt")}, review)
        if not row["text"]:
            raise APIError(400, "the prompt is empty")
        return await asyncio.to_thread(review.again, number, row["text"], versions)

    @api.post("/undo")
    async def undo(request: Request) -> list[dict[str, Any]]:
        await read_json(request, dict)
        return await asyncio.to_thread(review.undo)

    api.add_api_route("/status", review.status)
    add_page(api, PAGE, STATIC / "base.css")
    app.include_router(api, prefix=f"/{token}")
    app.add_middleware(Gate)
    for kind in (NanoVLMError, APIError, Exception):
        app.add_exception_handler(kind, send_error)
    return app


async def send_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, NanoVLMError):
        error = APIError(409, str(error))
    elif not isinstance(error, APIError):
        logger.error("a request failed", exc_info=error)
        error = APIError(500, "a bug; the terminal shows more")
    return error.response


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


def read_change(item: Any, review: Review) -> Wanted:
    match item:
        case {"id": int(number), "text": str(text), "version": str(version)} if 0 <= number < len(review.images):
            sent = item.get("sent")  # a text that the page has sent, and whose version it does not know yet
            return number, {"text": text.strip()}, {version, text_hash(sent) if isinstance(sent, str) else version}
    raise APIError(400, "a change has the id of a listed image, a text and the version that it replaces")


def serve_review(review: Review, listening_socket: socket.socket, open_browser: Callable[[str], Any]) -> None:
    """Serve the page until SIGINT or SIGTERM. The browser opens a private file, as ps shows its command line to all."""
    token = secrets.token_urlsafe(16)
    address = f"http://127.0.0.1:{listening_socket.getsockname()[1]}/{token}/"
    logger.info("%s shows %s; stop it with ctrl-c", address, count(len(review.images), "caption"))
    server = Server(make_review_app(review, token))
    with files.scratch_folder() as folder:
        files.replace(folder / "open.html", f'<meta http-equiv="refresh" content="0;url={address}">')
        url = (folder / "open.html").as_uri()
        threading.Thread(target=open_browser, args=[url], daemon=True).start()  # the page waits for the server
        server.run(sockets=[listening_socket])
