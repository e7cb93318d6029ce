"""The chat service: takes a request through its limits, preprocessing, the engine and back to the client."""

import asyncio
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from models.inference.continuous_batching import ContinuousBatch
from nanovlm.captioner import Captioner
from nanovlm.errors import ImageError
from nanovlm.serving.admission import Admission, Limits, PixelBudget
from nanovlm.serving.chat_format import Chat, invalid_image, parse_messages, prepare_inputs
from nanovlm.serving.connection import cancel_on_disconnect, read_body, request_deadline
from nanovlm.serving.engine import Engine
from nanovlm.serving.errors import APIError, as_api_error
from nanovlm.serving.image_urls import ImageFetcher, is_data_url
from nanovlm.serving.metrics import Metrics
from nanovlm.serving.protocol import ChatCompletionRequest, CompletionFormat
from nanovlm.serving.streaming import EventStreamResponse, ResponseStream, StopStringStreamer, stream_events

DEFAULT_MAX_TOKENS = 256
PIXEL_BUDGET_BYTES = 2**28  # of images that are decoded and not prefilled yet, as float32


class ChatService:
    """Answers chat completions with one model.

    fetcher, engine and pixel_budget_bytes replace the defaults: no remote images, an engine of the captioner's model.
    """

    def __init__(
        self,
        captioner: Captioner,
        name: str,
        limits: Limits | None = None,
        *,
        fetcher: ImageFetcher | None = None,
        engine: Engine | None = None,
        pixel_budget_bytes: int = PIXEL_BUDGET_BYTES,
    ):
        self.captioner, self.name, self.limits = captioner, name, limits or Limits()
        self.engine = engine or Engine(lambda: new_batch(captioner, self.limits.max_num_seqs))
        self.fetcher = fetcher or ImageFetcher()
        self.admission = Admission(self.limits.max_num_seqs + self.limits.max_pending)
        self.metrics = Metrics(
            lambda: self.engine.num_running,
            lambda: self.num_waiting,
            lambda: self.engine.cache_bytes_used,
            lambda: self.engine.cache_bytes_allocated,
        )
        image_bytes = captioner.processor.max_tiles_per_image * 3 * captioner.processor.cfg.vit_img_size**2 * 4
        self.pixel_budget = PixelBudget(max(1, pixel_budget_bytes // image_bytes))
        self._executor = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "nanovlm-images")  # each may decode an image

    @property
    def num_waiting(self) -> int:
        """Admitted sequences that do not run yet."""
        return max(0, self.admission.count - self.engine.num_running)

    def start(self) -> None:
        """Start the engine; call it in the event loop that serves requests."""
        self.engine.start()

    def close(self) -> None:
        """Stop the engine after its current step."""
        if self.engine.alive:
            self.engine.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def complete(self, request: Request) -> Response:
        """The response to one request. Whatever goes wrong is an APIError, and counted in the metrics."""
        try:
            response = await self._complete(request)
        except Exception as error:
            api_error = as_api_error(error)
            self.metrics.requests.labels(api_error.status).inc()
            raise api_error from None
        self.metrics.requests.labels(response.status_code).inc()
        return response

    async def _complete(self, request: Request) -> Response:
        arrival = asyncio.get_running_loop().time()
        deadline = arrival + self.limits.timeout_s
        async with AsyncExitStack() as request_scope:  # what it holds is released when the response ends
            async with request_deadline(deadline, self.limits.timeout_s):
                self.admission.acquire(request_scope)
                body = await read_body(request, self.limits.max_body_bytes)
                chat_request = await asyncio.get_running_loop().run_in_executor(
                    self._executor, ChatCompletionRequest.parse, body
                )
                del body  # it may hold megabytes of images, as the request does
                work = self._respond(chat_request, request_scope, arrival)
                response = await cancel_on_disconnect(request, work)
            if isinstance(response, EventStreamResponse):
                response.request_scope = request_scope.pop_all()
        return response

    async def _respond(self, request: ChatCompletionRequest, request_scope: AsyncExitStack, arrival: float) -> Response:
        now = asyncio.get_running_loop().time
        stream = await self._submit(request, request_scope)
        request_scope.callback(self._count_tokens, stream)
        texts = stream.texts()
        first = await anext(texts)
        self.metrics.first_token.observe(now() - arrival)
        request_scope.callback(lambda: self.metrics.answer.observe(now() - arrival))
        completion = CompletionFormat(uuid.uuid4().hex, self.name)
        if request.stream:
            deadline = partial(request_deadline, arrival + self.limits.timeout_s, self.limits.timeout_s)
            usage = request.stream_options.include_usage
            return EventStreamResponse(stream_events(stream, completion, first, texts, usage, deadline))
        answers = [first.get(index, "") for index in range(request.n)]
        async for new in texts:
            for index, text in new.items():
                answers[index] += text
        return JSONResponse(completion.response(answers, stream.finish_reasons, stream.usage))

    async def _submit(self, request: ChatCompletionRequest, request_scope: AsyncExitStack) -> ResponseStream:
        """Check and preprocess a request, and submit it to the engine."""
        if request.model != self.name:
            raise self.model_not_found(request.model)
        if request.n > self.admission.capacity:
            message = (
                f"n={request.n} is more than the {self.admission.capacity} answers that this server has places for"
            )
            raise APIError(400, message, param="n")
        self.admission.acquire_more(request.n - 1, request_scope)
        sampling, chat = request.sampling_params(), parse_messages(request.messages)
        request.messages.clear()  # from here on only chat holds the encoded images
        files = await self._fetch_images(chat)
        reservation = await self.pixel_budget.acquire(len(files), request_scope)
        inputs = await reservation.run(
            self._executor, prepare_inputs, chat, files, self.captioner.processor, self.limits.max_pixels
        )
        max_tokens = self._max_tokens(request, len(inputs.input_ids))
        handle = self.engine.submit(inputs.input_ids, inputs.images, max_tokens, sampling)
        request_scope.callback(handle.cancel)
        streamers = [StopStringStreamer(self.captioner.tokenizer, request.stop) for _ in sampling]
        return ResponseStream(handle, streamers, len(inputs.input_ids), on_prefilled=reservation.release)

    def model_not_found(self, name: str) -> APIError:
        return APIError(404, f"no model {name!r} here, only {self.name!r}", "model_not_found", "model")

    async def _fetch_images(self, chat: Chat) -> list[str | bytes]:
        """The files of remote images; data URLs remain as they are, since a thread decodes them faster."""
        files: list[str | bytes] = []
        free_bytes = self.limits.max_body_bytes
        for number, url in enumerate(chat.image_urls, 1):
            if is_data_url(url):
                files.append(url)
                continue
            try:
                file = await self.fetcher.fetch(url, free_bytes)
            except ImageError as error:
                raise invalid_image(f"image {number}: {error}") from None
            files.append(file)
            free_bytes -= len(file)
        return files

    def _max_tokens(self, request: ChatCompletionRequest, prompt_tokens: int) -> int:
        """How many tokens to generate for each sequence; APIError if the context has no room for them."""
        context = self.captioner.processor.cfg.lm_max_position_embeddings
        room = context - prompt_tokens + 1  # the last token is never read
        limit = f"the model's context (lm_max_position_embeddings={context})"
        if room < 1:
            message = f"a prompt of {prompt_tokens} tokens exceeds {limit}; shorten the messages"
            raise APIError(400, message, "context_length_exceeded", "messages")
        field = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        max_tokens = getattr(request, field) or min(DEFAULT_MAX_TOKENS, room)
        if max_tokens > room:
            message = f"a prompt of {prompt_tokens} tokens and {field}={max_tokens} exceed {limit}; lower {field}"
            raise APIError(400, message, "context_length_exceeded", field)
        return max_tokens

    def _count_tokens(self, stream: ResponseStream) -> None:
        self.metrics.prompt_tokens.inc(stream.num_prompt_tokens)
        self.metrics.answer_tokens.inc(stream.num_tokens)


def new_batch(captioner: Captioner, max_num_seqs: int) -> ContinuousBatch:
    return ContinuousBatch(
        captioner.inference, max_num_seqs=max_num_seqs, eos_token_id=captioner.tokenizer.eos_token_ids
    )
