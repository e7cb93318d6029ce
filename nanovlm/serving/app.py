"""The server: OpenAI's API at /v1, health and the page; and the way of a request from its body to its response."""

import asyncio
import hashlib
import hmac
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.responses import Response as HTTPResponse
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovlm.embedded import SAMPLE
from nanovlm.errors import ImageError, MissingExtraError, NanoVLMError, PromptTooLongError, SchemaError
from nanovlm.options import CHAT_MAX_NEW_TOKENS, generation_options
from nanovlm.processing.conversation import Chat, images_of, with_images
from nanovlm.processing.image_loading import decode_data_url, is_data_url, load_image
from nanovlm.processing.image_urls import fetch
from nanovlm.serving.openai_api import ChatRequest, ImageURL, Response, StopStrings, event
from nanovlm.serving.options import ServeOptions
from nanovlm.serving.web import GET, STATIC, APIError, Gate, Server, add_page, read_body

if TYPE_CHECKING:  # a port in use is reported before torch is imported
    from models.inference.caches import TiledImage
    from models.inference.continuous_batching import Request as Prompt
    from nanovlm.captioner import Captioner

logger = logging.getLogger(__name__)

MAX_PIXELS = 64_000_000  # of an image: the largest that phones save
MAX_PREPARED = 8  # requests that are preprocessed and not prefilled yet: memory holds their pixels
CLIENT_LEFT = 499  # nginx's status; nobody reads it


def make_app(captioner: "Captioner", name: str, options: ServeOptions, description: str = "") -> FastAPI:
    """The server as an ASGI app; description is what /v1/models and the page say about the model."""
    chats = Chats(captioner, name, options)

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

    app = FastAPI(title="nanoVLM", lifespan=lifespan, openapi_url=None)
    api = APIRouter(dependencies=[Depends(check_key)])
    api.add_api_route("/chat/completions", chats.complete, methods=["POST"])

    @api.api_route("/models", methods=GET)
    def list_models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "nanovlm"}
        model |= {"max_model_len": captioner.processor.cfg.lm_max_position_embeddings}  # vLLM's
        model |= {"description": description, "default_prompt": captioner.prompt}  # the page's
        return {"object": "list", "data": [model]}

    @api.api_route("/models/{model:path}", methods=GET)
    def retrieve_model(model: str) -> dict[str, Any]:
        if model != name:
            raise APIError(404, f"no model {model!r} here, only {name!r}", "model_not_found", "model")
        return list_models()["data"][0]

    @app.api_route("/health", methods=GET)
    def health() -> JSONResponse:
        running = chats.engine.batch.running
        alive = chats.engine.alive
        counts = {"running": running, "waiting": max(0, len(chats.active) - running)}
        return JSONResponse({"status": "ok" if alive else "stopped", "model": name} | counts, 200 if alive else 503)

    if options.allow_origin:
        cors: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["Retry-After"]}
        app.add_middleware(CORSMiddleware, allow_origins=options.allow_origin, **cors)
    app.add_middleware(Gate, hosts=options.hosts, origins=options.allow_origin)
    app.add_middleware(RequestLog, release=chats.release, quiet=options.quiet)
    app.include_router(api, prefix="/v1")
    app.include_router(api)  # some clients leave /v1 out, as llama.cpp's server allows
    add_page(app.router, STATIC, SAMPLE)
    for kind in (NanoVLMError, APIError, HTTPException, TimeoutError, Exception):
        app.add_exception_handler(kind, chats.send_error)
    app.state.chats = chats
    return app


class RequestLog:
    """Logs each answer and refusal. At the end of a request its response, if there is one, goes to release."""

    def __init__(self, app: ASGIApp, release: Callable[[Response], Awaitable[None]], quiet: bool):
        self.app = app
        self.release = release
        self.quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status = CLIENT_LEFT
        state = scope.setdefault("state", {})
        try:
            await self.app(scope, receive, send)
            status = 200
        finally:
            response = state.get("response")
            problem = state.get("problem")
            if response is not None:
                await self.release(response)
            if not self.quiet and (response or problem):
                details = problem or response.summary(time.monotonic() - started)
                status = problem.status if problem else status
                logger.info("%s %s %d: %s", scope["method"], scope["path"], status, details)


class Chats:
    """Chat completions from body to response, as many at once as the options allow."""

    def __init__(self, captioner: "Captioner", name: str, options: ServeOptions):
        from models.inference.caches import ImageCache, PrefixCache
        from nanovlm.serving.engine import Engine

        self.captioner = captioner
        self.name = name
        self.options = options
        self.image_cache = ImageCache(options.image_cache) if options.image_cache else None
        prefix_cache = PrefixCache(options.prefix_cache) if options.prefix_cache else None
        caches = {"image_cache": self.image_cache, "prefix_cache": prefix_cache}
        self.engine = Engine(lambda: captioner.batch(options.max_num_seqs, **caches))
        self.active: set[Response] = set()
        self.arriving = 0  # bytes of bodies that are not there yet
        self.prepared = asyncio.Semaphore(MAX_PREPARED)  # which requests pass in the order of their arrival

    async def send_error(self, request: Request, error: Exception) -> JSONResponse:
        problem = request.state.problem = self.as_api_error(error, f"{request.method} {request.url.path}")
        return problem.response

    def as_api_error(self, error: Exception, route: str = "") -> APIError:
        """An error in words for the client, who learns no details of an unexpected one."""
        match error:
            case APIError():
                return error
            case PromptTooLongError():
                return APIError(400, str(error), "context_length_exceeded", "messages")
            case ImageError():
                return APIError(400, str(error), "invalid_image", "messages")
            case SchemaError() | MissingExtraError():
                return APIError(400, f"response_format: {error}", param="response_format")
            case NanoVLMError():
                return APIError(400, str(error), param=error.field or "messages")
            case HTTPException():
                return APIError(error.status_code, f"{route}: {error.detail}", headers=dict(error.headers or {}))
            case ClientDisconnect():
                return APIError(CLIENT_LEFT, "the client disconnected")
            case TimeoutError():
                message = f"no complete answer within {self.options.timeout:g} s; ask for fewer tokens"
                return APIError(504, message, "timeout")
        logger.error("a request failed", exc_info=error)
        return APIError(500, "internal server error; the server's log has the reason")

    async def complete(self, http: Request) -> HTTPResponse:
        """The response to one request, which has its place once its body is there."""
        body = await read_body(http, self.options.max_body, self._count_arriving)
        if len(self.active) >= self.options.places:
            raise full(f"all {self.options.places} places for running and waiting answers are taken")
        response = http.state.response = Response(self.name)
        self.active.add(response)
        http.state.deadline = asyncio.get_running_loop().time() + self.options.timeout
        async with asyncio.timeout_at(http.state.deadline):
            request = await asyncio.to_thread(ChatRequest.parse, body)
            del body
            return await unless_disconnected(http, self._answer(request, response, http.state))

    def _count_arriving(self, n_bytes: int) -> None:
        self.arriving += n_bytes
        if self.arriving > self.options.places * self.options.max_body:
            raise full(f"{self.options.places * self.options.max_body:,} bytes of requests are arriving")

    async def release(self, response: Response) -> None:
        """Give the place of a response back; an answer that is still generated is cancelled."""
        self.active.discard(response)
        if response.pieces is not None:
            await response.pieces.aclose()

    async def _answer(self, request: ChatRequest, response: Response, state: State) -> HTTPResponse:
        chat = [message.turn for message in request.messages]
        request.messages.clear()  # from here on only chat holds the encoded images
        images = images_of(chat)
        response.n_images = len(images)
        self.captioner.processor.check_bytes([turn.text for turn in chat], len(images))  # before any is fetched
        files = await self._files(images)
        async with self.prepared:
            prompt = await asyncio.to_thread(self._prepare, request, chat, files)
            del chat, images, files
            response.prompt_tokens = len(prompt.ids)
            response.pieces = self._pieces(prompt, request, response)
            first = await anext(response.pieces)
        if request.stream:
            events = self._events(first, request, state)
            return StreamingResponse(events, headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream")
        return JSONResponse(response.whole(first + "".join([piece async for piece in response.pieces])))

    async def _files(self, images: list[ImageURL]) -> list[bytes | str]:
        """Remote files of images; data URLs as they are, since a thread decodes them."""
        files: list[bytes | str] = [image.url for image in images]
        free = self.options.max_body
        for i, image in enumerate(images):
            if is_data_url(image.url):
                continue
            if not self.options.allow_remote:
                ways = "send data:image/png;base64,... or start it with --allow-remote"
                raise ImageError(f"{image.url[:60]!r} holds no image, and this server fetches none; {ways}")
            files[i] = await fetch(image.url, free)
            free -= len(files[i])
        return files

    def _prepare(self, request: ChatRequest, chat: Chat, files: list[bytes | str]) -> "Prompt":
        """Request of a chat; a thread's work."""
        defaults = {"max_new_tokens": CHAT_MAX_NEW_TOKENS, **self.captioner.defaults}
        options = generation_options(request.options(), {}, defaults)
        images = self._images(images_of(chat), files)
        chat = with_images(chat, images)
        return self.captioner.chat_request(chat, options, default=self.captioner.prompt if images else "")

    def _images(self, images: list[ImageURL], files: list[bytes | str]) -> "list[TiledImage]":
        """Tiles of images; one that the cache holds is neither decoded nor encoded again.

        More images than the context holds are refused before they fill the memory.
        """
        processor = self.captioner.processor
        tiled: list[TiledImage] = []
        n_tokens = 0
        for number, (image, file) in enumerate(zip(images, files), 1):
            name = f"image {number}"
            data = file if isinstance(file, bytes) else decode_data_url(file, name)
            key = image.detail == "low", hashlib.blake2b(data, digest_size=16).digest()
            found = None if self.image_cache is None else self.image_cache.get(key)
            if found is None:
                max_tiles = 1 if image.detail == "low" else None
                found = processor.tiled(load_image(data, name, MAX_PIXELS), max_tiles, key=key)
            tiled.append(found)
            n_tokens += found.n_tiles * processor.cfg.mp_image_token_length
            what = f"prompt is too long: {len(files)} images, of which the first {number} take {n_tokens} tokens,"
            processor.cfg.validate_length(n_tokens, 1, what, "send fewer")
        return tiled

    async def _pieces(self, prompt: "Prompt", request: ChatRequest, response: Response) -> AsyncGenerator[str, None]:
        """Text of an answer as its tokens come, up to a stop string; the first may be empty."""
        from nanovlm.processing.tokenizer import StreamingDecoder

        decoder = StreamingDecoder(self.captioner.tokenizer)
        stops = StopStrings(request.stop)
        async with aclosing(self.engine.generate(prompt)) as outputs:
            async for output in outputs:
                response.completion_tokens += 1
                response.cached_tokens = prompt.n_cached
                is_end = output.token_id == self.captioner.tokenizer.eos_token_id
                text = "" if is_end else decoder.add(output.token_id)
                text += decoder.rest() if output.finished else ""
                text, is_stopped = stops.add(text, output.finished is not None)
                yield text
                if is_stopped:
                    break
        is_cut = output.finished == "length" and not is_stopped
        response.finish_reason = "length" if is_cut else "stop"  # OpenAI knows no end by repetition

    async def _events(self, piece: str | None, request: ChatRequest, state: State) -> AsyncIterator[str]:
        """Events of a streamed answer; an error is the last one, as the status has been sent already."""
        response: Response = state.response
        yield response.chunk(role="assistant", content="")
        try:
            while piece is not None:
                if piece:
                    yield response.chunk(content=piece)
                async with asyncio.timeout_at(state.deadline):
                    piece = await anext(response.pieces, None)
        except Exception as error:
            state.problem = self.as_api_error(error)
            yield event(state.problem.body)
            return
        yield response.chunk()
        if request.stream_options.include_usage:
            yield response.usage_chunk()
        yield "data: [DONE]\n\n"


def full(what: str) -> APIError:
    headers = {"Retry-After": "1", "Connection": "close"}  # the rest of a body is not read
    return APIError(429, f"{what}; try again in a second", "rate_limit_exceeded", headers=headers)


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, HTTPResponse]) -> HTTPResponse:
    """The result of work, which is cancelled if the client leaves."""
    answer = asyncio.ensure_future(work)
    departure = asyncio.ensure_future(http.receive())  # nothing else can follow the body
    try:
        await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        departure.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


def serve(app: FastAPI, listening_socket: socket.socket, options: ServeOptions, name: str) -> None:
    """Serve until SIGINT or SIGTERM."""
    port = listening_socket.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    logger.info("http://%s:%d serves %r: a page, and OpenAI's API at /v1; stop it with ctrl-c", host, port, name)
    chats: Chats = app.state.chats
    Server(app, active=chats.active).run(sockets=[listening_socket])
    chats.engine.stop()  # after a second signal, too: Python aborts if a thread is inside torch when it exits
