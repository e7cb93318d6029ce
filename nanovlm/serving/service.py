"""Where requests are answered: how many at once, how much, how long; whole, or word by word."""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nanovlm.captioner import Captioner
from nanovlm.serving.chat_format import ResponseStream, prepare, understand
from nanovlm.serving.engine import Answers, Engine
from nanovlm.serving.image_urls import picture_bytes
from nanovlm.serving.metrics import Metrics
from nanovlm.serving.protocol import ChatRequest, Completion, Problem, usage

MAX_NEW_TOKENS = 256  # where a request names no number
PIXELS = 2**28  # bytes of pixels that may wait for the model; other requests wait as small as they came
LEFT = 499  # nginx's number for a client that is gone; nobody reads it


@dataclass(frozen=True)
class Limits:
    rows: int = 32  # answers said at once
    queue: int = 64  # more that may wait
    body: int = 20 * 2**20  # bytes of a request, and of a remote picture
    pixels: int = 40_000_000  # of a picture
    seconds: float = 120.0  # from a request's arrival to its answer's end


class ChatService:
    """Answers chat completions about pictures, by one model."""

    def __init__(self, captioner: Captioner, name: str, limits: Limits, allow_remote: bool = False):
        self.captioner, self.name, self.limits = captioner, name, limits
        self.engine = Engine(captioner.model, captioner.tokenizer.eos_token_id, limits.rows)
        self.metrics = Metrics(lambda: self.engine.running, lambda: self.waiting)
        self.fetch = partial(picture_bytes, allow_remote=allow_remote, max_bytes=limits.body)
        self.threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "nanovlm-pictures")  # each may hold a picture
        self.seats = limits.rows + limits.queue
        self.taken = 0  # of the seats, one for each answer
        a_picture = captioner.processor.max_tiles_per_image * 3 * captioner.model.cfg.vit_img_size**2 * 4
        self.shelf = max(1, PIXELS // a_picture)  # how many pictures may wait as pixels
        self.places, self.turn = asyncio.Semaphore(self.shelf), asyncio.Lock()
        self.draining = False

    @property
    def waiting(self) -> int:
        """Answers that are not yet begun."""
        return max(0, self.taken - self.engine.running)

    async def answer(self, request: Request) -> Response:
        """The response to one request, or a Problem."""
        arrived = asyncio.get_running_loop().time()
        try:
            async with AsyncExitStack() as visit:
                async with asyncio.timeout_at(arrived + self.limits.seconds):
                    self._admit(visit)
                    work = self._respond(await read_body(request, self.limits.body), visit, arrived)
                    response = await unless_gone(request, work)
                if isinstance(response, Events):
                    response.visit = visit.pop_all()  # it lasts as long as they do
        except Exception as error:
            problem = self._problem(error)
            self.metrics.requests.labels(problem.status if problem else 500).inc()
            raise problem or error from None
        self.metrics.requests.labels(response.status_code).inc()
        return response

    def _problem(self, error: Exception) -> Problem | None:
        """What to tell the client of an error, if it is not the server's own."""
        match error:
            case Problem():
                return error
            case TimeoutError():
                seconds = self.limits.seconds
                return Problem(504, f"no whole answer within {seconds:g} s; ask for fewer tokens", code="timeout")
            case ClientDisconnect():
                return Problem(LEFT, "the client left")
        return None

    def _admit(self, visit: AsyncExitStack) -> None:
        if self.draining:
            raise Problem(503, "the server is stopping; ask again when it is back", headers={"Retry-After": "5"})
        self._sit(1, visit)

    def _sit(self, n: int, visit: AsyncExitStack) -> None:
        """Take n seats until the visit ends, or raise a Problem."""
        if self.taken + n > self.seats:
            message = f"all {self.seats} places are taken; ask again in a second"
            raise Problem(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.taken += n
        visit.callback(self._rise, n)

    def _rise(self, n: int) -> None:
        self.taken -= n

    async def _shelve(self, n: int, visit: AsyncExitStack) -> ExitStack:
        """Wait for places for n pictures' pixels, in order of arrival; closed, it gives them back."""
        places = visit.enter_context(ExitStack())
        async with self.turn:  # else two could wait for the places that each has taken already
            for _ in range(min(n, self.shelf)):
                await self.places.acquire()
                places.callback(self.places.release)
        return places

    async def _respond(self, body: bytes, visit: AsyncExitStack, arrived: float) -> Response:
        asked = await self._in_thread(ChatRequest.read, body)
        del body  # of several megabytes, perhaps, like the pictures in it
        if asked.model != self.name:
            raise Problem(404, f"no model {asked.model!r} here, only {self.name!r}", "model_not_found", "model")
        if asked.n > self.seats:
            raise Problem(400, f"n={asked.n} answers are more than this server has places, {self.seats}", param="n")
        self._sit(asked.n - 1, visit)
        samplings, chat = asked.samplings(), understand(asked.messages)
        places = await self._shelve(len(chat.urls), visit)
        ids, images = await self._in_thread(prepare, chat, self.captioner.processor, self.fetch, self.limits.pixels)
        answers = self.engine.ask(ids, images, self._longest(asked, len(ids)), samplings)
        visit.callback(answers.close)
        asked.messages.clear()
        del chat, images  # the engine keeps these until it has read them
        talk = Talk(answers, [ResponseStream(self.captioner.tokenizer, asked.stop) for _ in samplings], places.close)
        visit.callback(self._count, len(ids), talk)
        pieces, texts, now = talk.pieces(), [""] * asked.n, asyncio.get_running_loop().time
        first = await anext(pieces)
        self.metrics.first_token.observe(now() - arrived)
        visit.callback(lambda: self.metrics.answer.observe(now() - arrived))
        completion = Completion(uuid.uuid4().hex, self.name)
        if asked.stream:
            words = self._events(asked, completion, len(ids), talk, first, pieces, arrived + self.limits.seconds)
            return Events(words)
        for index, text in first.items():
            texts[index] += text
        async for said in pieces:
            for index, text in said.items():
                texts[index] += text
        finished = [speech.finished for speech in talk.speeches]
        return JSONResponse(completion.whole(texts, finished, usage(len(ids), talk.tokens)))

    def _longest(self, asked: ChatRequest, n_read: int) -> int:
        """How many tokens may be said after so many were read."""
        model = self.captioner.model
        room = model.cfg.lm_max_position_embeddings - n_read + 1
        longest = asked.max_completion_tokens or asked.max_tokens or max(1, min(MAX_NEW_TOKENS, room))
        try:
            model.validate_length(n_read, longest)
        except ValueError as error:
            raise Problem(400, str(error), "context_length_exceeded", "messages") from None
        return longest

    async def _events(self, asked, completion: Completion, n_read: int, talk: "Talk", first, pieces, deadline: float):
        """Server-sent events, as OpenAI's: who speaks, the words, why each answer ended, what it cost."""
        for index in range(asked.n):
            yield event(completion.piece(index, {"role": "assistant", "content": ""}))
        said = first
        try:
            while said is not None:
                for index, text in said.items():
                    if text:
                        yield event(completion.piece(index, {"content": text}))
                    if reason := talk.speeches[index].finished:
                        yield event(completion.piece(index, {}, reason))
                async with asyncio.timeout_at(deadline):
                    said = await anext(pieces, None)
        except (TimeoutError, Problem) as error:
            yield event(self._problem(error).body())
            return
        if asked.stream_options.include_usage:
            yield event(completion.last(usage(n_read, talk.tokens)))
        yield "data: [DONE]\n\n"

    def _count(self, n_read: int, talk: "Talk") -> None:
        self.metrics.prompt_tokens.inc(n_read)
        self.metrics.answer_tokens.inc(talk.tokens)

    async def _in_thread(self, function: Callable, *args):
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)


class Talk:
    """All answers to one request, as text; when each has begun, its prompt has been read."""

    def __init__(self, answers: Answers, speeches: list[ResponseStream], read: Callable[[], None]):
        self.answers, self.speeches, self.read = answers, speeches, read

    @property
    def tokens(self) -> int:
        return sum(speech.tokens for speech in self.speeches)

    async def pieces(self) -> AsyncIterator[dict[int, str]]:
        """What is new, for each answer of which something is; an answer whose stop string was said is cancelled."""
        while not all(speech.finished for speech in self.speeches):
            try:
                heard = await self.answers.hear()
            except Exception as error:
                raise Problem(500, f"the model failed: {str(error) or type(error).__name__}") from error
            new: dict[int, str] = {}
            for index, said in heard:
                speech = self.speeches[index]
                if not speech.finished:
                    new[index] = new.get(index, "") + speech.hear(said)
                    if speech.finished:
                        self.answers.cancel(index)
            if all(speech.tokens for speech in self.speeches):
                self.read()
            yield new


class Events(StreamingResponse):
    """Server-sent events of a visit, which ends with them, or when the client leaves."""

    visit: AsyncExitStack

    def __init__(self, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope, receive, send) -> None:
        async with self.visit:
            await super().__call__(scope, receive, send)


def event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def read_body(request: Request, limit: int) -> bytes:
    """The body of at most limit bytes. Of a longer one some is read and dropped, so that its client hears why."""
    body, length = bytearray(), 0
    async for chunk in request.stream():
        length += len(chunk)
        if length <= limit:
            body += chunk
        elif length > 8 * limit:
            break
    if length > limit:
        message = f"a request of more than {limit:,} bytes; send smaller pictures"
        raise Problem(413, message, headers={"Connection": "close"})
    return bytes(body)


async def unless_gone(request: Request, work: Awaitable[Response]) -> Response:
    """What work returns; when the client leaves before, work is cancelled and ClientDisconnect raised."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
