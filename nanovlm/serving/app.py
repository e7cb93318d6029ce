"""The server: OpenAI's API at /v1, health and the page; and the way of a request from its body to its response."""

import asyncio
import errno
import hmac
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.responses import Response as HTTPResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.inference.caches import ImageCache, PrefixCache
from models.inference.continuous_batching import ContinuousBatch
from models.inference.request import Request as Prompt
from nanovlm.captioner import Captioner
from nanovlm.console import count
from nanovlm.embedded import SAMPLE
from nanovlm.errors import ImageError, NanoVLMError, UsageError
from nanovlm.options import generation_options
from nanovlm.processing.image_urls import fetch
from nanovlm.processing.tokenizer import StreamingDecoder
from nanovlm.serving.chat_inputs import check_length, encode_chat, is_data_url, prepare_images, read_chat
from nanovlm.serving.engine import Engine
from nanovlm.serving.openai_api import (
    DEFAULT_MAX_TOKENS,
    APIError,
    ChatRequest,
    ImageURL,
    Response,
    StopStrings,
    event,
)
from nanovlm.serving.options import ServeOptions

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
PAGE = {
    "/": STATIC / "page.html",
    "/page.css": STATIC / "page.css",
    "/page.js": STATIC / "page.js",
    "/sample.png": SAMPLE,
}
GET = ["GET", "HEAD"]
MAX_PREPARED = 8  # requests that are preprocessed and not prefilled yet: memory holds their pixels
CLIENT_LEFT = 499  # nginx's status; nobody reads it
SECURITY_HEADERS = {  # on every response; the page loads nothing from elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def make_app(
    captioner: Captioner,
    name: str,
    options: ServeOptions,
    description: str = "",
    batch_type: Callable[..., ContinuousBatch] = ContinuousBatch,
) -> FastAPI:
    """The server as an ASGI app; description is what /v1/models and the page say about the model."""
    chats = Chats(captioner, name, options, batch_type)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        chats.engine.start()
        yield
        chats.engine.stop()

    def check_key(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # the bytes that were sent
        if options.api_key is not None and not hmac.compare_digest(given, options.api_key.encode()):
            message = "wrong or missing API key; send it as Authorization: Bearer KEY"
            raise APIError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def complete(request: Request) -> HTTPResponse:
        return await chats.complete(request)

    def list_models() -> dict[str, Any]:
        cfg = captioner.processor.cfg
        model = {"id": name, "object": "model", "created": 0, "owned_by": "nanovlm", "description": description}
        return {"object": "list", "data": [model | {"max_model_len": cfg.lm_max_position_embeddings}]}  # vLLM's

    def retrieve_model(model: str) -> dict[str, Any]:
        if model != name:
            raise APIError(404, f"no model {model!r} here, only {name!r}", "model_not_found", "model")
        return list_models()["data"][0]

    def health() -> JSONResponse:
        running = chats.engine.batch.running
        counts = {"running": running, "waiting": max(0, len(chats.active) - running)}
        status = "ok" if chats.engine.alive else "stopped"
        return JSONResponse({"status": status, "model": name, **counts}, 200 if status == "ok" else 503)

    app = FastAPI(title="nanoVLM", lifespan=lifespan, openapi_url=None)
    app.state.chats = chats
    if options.allow_origin:
        origins = {"allow_origins": options.allow_origin, "expose_headers": ["Retry-After"]}
        app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **origins)
    app.add_middleware(Gate, options=options)
    api = APIRouter(dependencies=[Depends(check_key)])
    for prefix in ("/v1", ""):  # some clients leave it out, as llama.cpp's server allows
        api.add_api_route(f"{prefix}/chat/completions", complete, methods=["POST"])
        api.add_api_route(f"{prefix}/models", list_models, methods=GET)
        api.add_api_route(f"{prefix}/models/{{model:path}}", retrieve_model, methods=GET)
    app.include_router(api)
    app.add_api_route("/health", health, methods=GET)
    for path, file in PAGE.items():
        app.add_api_route(path, send_file(file), methods=GET)
    for kind in (NanoVLMError, APIError, HTTPException, Exception):
        app.add_exception_handler(kind, send_error)
    return app


def send_file(file: Path) -> Callable[[], FileResponse]:
    """A route for one file; a parameter of the route would be the client's to choose."""
    return lambda: FileResponse(file, headers={"Cache-Control": "no-cache"})


async def send_error(request: Request, error: Exception) -> JSONResponse:
    problem = request.state.problem = as_api_error(error, f"{request.method} {request.url.path}")
    return JSONResponse(problem.body, problem.status, problem.headers)


def as_api_error(error: BaseException, route: str = "") -> APIError:
    """An error in words for the client, who learns no details of an unexpected one."""
    match error:
        case APIError():
            return error
        case NanoVLMError():
            return APIError(400, str(error))
        case HTTPException():
            return APIError(error.status_code, f"{route}: {error.detail}", headers=dict(error.headers or {}))
        case ClientDisconnect():
            return APIError(CLIENT_LEFT, "the client disconnected")
    logger.error("a request failed", exc_info=error)
    return APIError(500, "internal server error; the server's log has the reason")


class Gate:
    """Refuses foreign host names (DNS rebinding) and pages of other origins; releases and logs each request.

    Any web page in a browser can send requests to a server on the same machine.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions):
        self.app, self.options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status = time.monotonic(), CLIENT_LEFT
        state = scope.setdefault("state", {})

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            if problem := self._refusal(Headers(scope=scope)):
                state["problem"] = problem
                await JSONResponse(problem.body, problem.status)(scope, receive, send_with_headers)
            else:
                await self.app(scope, receive, send_with_headers)
        finally:
            response: Response | None = state.get("response")
            if response is not None:
                await response.release()
                status = response.status if status == 200 else status
            if not self.options.quiet and (response is not None or status >= 400):
                details = state.get("problem") or describe(response, time.monotonic() - started)
                logger.info("%s %s %d: %s", scope["method"], scope["path"], status, details)

    def _refusal(self, headers: Headers) -> APIError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        hosts, origins = self.options.hosts, self.options.allow_origin
        if hosts is not None and host_name(host) not in hosts:
            return APIError(403, f"this server does not serve the host name {host!r}; start it with --allow-host to")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        if origin is None or origin.lower() in own or "*" in origins or origin in origins:
            return None
        message = f"pages of {origin!r} may not use this server; open its own page, or start it with --allow-origin"
        return APIError(403, message)


def host_name(host: str) -> str:
    """The name in a Host header, without the port; empty without one."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def describe(response: Response | None, seconds: float) -> str:
    """Counts and speed of an answer, for the log."""
    if response is None:
        return "refused"
    images, speed = count(response.n_images, "image"), response.completion_tokens / max(seconds, 1e-9)
    tokens = f"{response.prompt_tokens} + {response.completion_tokens} tokens"
    return f"{images}, {tokens}, {seconds:.2f} s, {speed:.1f} tokens/s"


class Chats:
    """Chat completions from body to response, as many at once as the options allow."""

    def __init__(
        self, captioner: Captioner, name: str, options: ServeOptions, batch_type: Callable[..., ContinuousBatch]
    ):
        self.captioner, self.name, self.options = captioner, name, options
        self.image_cache = ImageCache(options.image_cache) if options.image_cache else None
        prefix_cache = PrefixCache(options.prefix_cache) if options.prefix_cache else None
        self.engine = Engine(
            lambda: batch_type(
                captioner.inference,
                max_num_seqs=options.max_num_seqs,
                eos_token_id=captioner.tokenizer.eos_token_ids,
                image_cache=self.image_cache,
                prefix_cache=prefix_cache,
            )
        )
        self.active: set[Response] = set()
        self.prepared = asyncio.Semaphore(MAX_PREPARED)  # which requests pass in the order of their arrival
        self.context = captioner.processor.cfg.lm_max_position_embeddings
        self.max_chars = self.context * max(map(len, captioner.tokenizer.backend.get_vocab()))

    async def complete(self, http: Request) -> HTTPResponse:
        """The response to one request, which has its place before its body is read."""
        places = self.options.max_num_seqs + self.options.max_pending
        if len(self.active) >= places:
            message = f"all {places} places for running and waiting answers are taken; try again in a second"
            raise APIError(429, message, "rate_limit_exceeded", headers={"Retry-After": "1"})
        response = http.state.response = Response(self.name, self.active)
        deadline = asyncio.get_running_loop().time() + self.options.timeout
        async with self._until(deadline):
            body = await read_body(http, self.options.max_body)
            request = await asyncio.to_thread(ChatRequest.parse, body)
            del body
            return await unless_disconnected(http, self._answer(request, response, deadline))

    async def _answer(self, request: ChatRequest, response: Response, deadline: float) -> HTTPResponse:
        n_chars = sum(len(message.text) for message in request.messages)
        if n_chars > self.max_chars:  # it would take long to tokenize
            check_length(self.context + 1, self.captioner.processor, f"{n_chars:,} characters")
        chat = read_chat(request.messages, self.captioner.processor.layout.images_in_turns)
        request.messages.clear()  # from here on only chat holds the encoded images
        response.n_images = len(chat.images)
        files = await self._files(chat.images)
        async with self.prepared:
            prompt = await asyncio.to_thread(self._prepare, request, chat, files)
            del chat, files
            response.prompt_tokens = len(prompt.ids)
            response.pieces = self._pieces(prompt, request, response)
            first = await anext(response.pieces)
        if request.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            events = self._events(first, request, response, deadline)
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        text = first + "".join([piece async for piece in response.pieces])
        return JSONResponse(response.whole(text))

    async def _files(self, images: list[ImageURL]) -> list[bytes | str]:
        """Remote files of images; data URLs as they are, since a thread decodes them."""
        files: list[bytes | str] = []
        free = self.options.max_body
        for number, image in enumerate(images, 1):
            try:
                if is_data_url(image.url):
                    files.append(image.url)
                    continue
                if image.url[:5].lower() not in ("http:", "https"):
                    raise ImageError(f"{image.url[:60]!r} is not an image URL; send data:image/png;base64,...")
                if not self.options.allow_remote:
                    raise ImageError(
                        f"{image.url[:60]!r} is remote, and this server fetches no images; send "
                        "data:image/png;base64,... or start it with --allow-remote"
                    )
                files.append(await fetch(image.url, free))
                free -= len(files[-1])
            except ImageError as error:
                raise APIError(400, f"image {number}: {error}", "invalid_image", "messages") from None
        return files

    def _prepare(self, request: ChatRequest, chat: Any, files: list[bytes | str]) -> Prompt:
        """What the model reads; a thread's work."""
        processor, grammar = self.captioner.processor, None
        defaults = self.captioner.defaults
        options = generation_options(request.options(), {}, defaults)
        images = prepare_images(files, [image.detail for image in chat.images], processor, self.image_cache)
        try:
            if options.schema is not None:
                structured_output = self.captioner.structured_output
                (grammar,) = structured_output.make_processors(options.schema, 1, "response_format", untrusted=True)
        except NanoVLMError as error:
            raise APIError(400, str(error), param="response_format") from None
        try:
            ids = encode_chat(chat, images, processor)
        except NanoVLMError as error:  # the model has no chat template, or the template refuses this chat
            raise APIError(400, str(error), param="messages") from None
        room = self.context - len(ids) + 1  # the last token is never read
        max_new_tokens = request.max_new_tokens(room, defaults.get("max_new_tokens", DEFAULT_MAX_TOKENS))
        return Prompt(ids, images, options.sampling, max_new_tokens, grammar)

    async def _pieces(self, prompt: Prompt, request: ChatRequest, response: Response) -> AsyncGenerator[str, None]:
        """Text of an answer as its tokens come, up to a stop string; the first may be empty."""
        decoder, stops = StreamingDecoder(self.captioner.tokenizer), StopStrings(request.stop)
        async with aclosing(self.engine.generate(prompt)) as outputs:
            async for output in outputs:
                response.completion_tokens += 1
                response.cached_tokens = prompt.n_cached
                is_end = output.token_id == self.captioner.tokenizer.eos_token_id
                text = "" if is_end else decoder.add(output.token_id)
                text += decoder.rest() if output.finished else ""
                text, is_stopped = stops.add(text, output.finished is not None)
                response.finish_reason = "stop" if is_stopped else output.finished
                yield text
                if is_stopped:
                    return

    async def _events(
        self, piece: str | None, request: ChatRequest, response: Response, deadline: float
    ) -> AsyncIterator[str]:
        """Events of a streamed answer; an error is the last one, as the status has been sent already."""
        assert response.pieces is not None
        yield response.chunk({"role": "assistant", "content": ""})
        try:
            while piece is not None:
                if piece:
                    yield response.chunk({"content": piece})
                async with self._until(deadline):
                    piece = await anext(response.pieces, None)
        except Exception as error:
            problem = as_api_error(error)
            response.status = problem.status
            yield event(problem.body)
            return
        yield response.chunk({}, is_last=True)
        if request.stream_options.include_usage:
            yield response.usage_chunk()
        yield "data: [DONE]\n\n"

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            message = f"no complete answer within {self.options.timeout:g} s; ask for fewer tokens"
            raise APIError(504, message, "timeout") from None


async def read_body(http: Request, max_bytes: int) -> bytes:
    """The body of a request; APIError 413 if it is too large.

    A client reads the response only after it has sent its request, so some of a large body is received and dropped.
    """
    body, length = bytearray(), 0
    async for chunk in http.stream():
        length += len(chunk)
        if length <= max_bytes:
            body += chunk
        elif length > 8 * max_bytes:
            break
    if length > max_bytes:
        message = f"the request has more than {max_bytes:,} bytes; send smaller images"
        raise APIError(413, message, headers={"Connection": "close"})
    return bytes(body)


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, HTTPResponse]) -> HTTPResponse:
    """The result of work, which is cancelled if the client leaves."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def listen(options: ServeOptions) -> socket.socket:
    """The open port. Requests wait there until the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, TypeError) as error:  # TypeError: a host that is no text for the network
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        port_taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        remedy = "--port 0 takes any free port" if port_taken else "name an address of this machine"
        raise UsageError(f"--host {options.host} --port {options.port}: {reason}; {remedy}") from None


class Server(uvicorn.Server):
    """Finishes running answers at the first signal, and stops at once at the second."""

    def __init__(self, app: FastAPI, **config: Any):
        config = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none"} | config
        super().__init__(uvicorn.Config(app, http="h11", **config))
        self.chats: Chats = app.state.chats

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # no traceback of each answer that is cut off
            self.force_exit = True
        elif self.chats.active:
            logger.info("finishing %s; press ctrl-c again to stop at once", count(len(self.chats.active), "answer"))
        self.should_exit = True


def serve(app: FastAPI, listening_socket: socket.socket, options: ServeOptions, name: str) -> None:
    """Serve until SIGINT or SIGTERM."""
    port, host = listening_socket.getsockname()[1], f"[{options.host}]" if ":" in options.host else options.host
    page = f"http://{host}:{port}"
    logger.info("%s serves %r: a page, and OpenAI's API at /v1; stop it with ctrl-c", page, name)
    server = Server(app)
    server.run(sockets=[listening_socket])
    server.chats.engine.stop()  # after a second signal, too: Python aborts if a thread is inside torch when it exits
