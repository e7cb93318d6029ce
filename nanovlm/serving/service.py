"""The chat service: takes a request through its limits, preprocessing, the engine and back to the client."""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from models.inference.caches import ImageCache, PrefixCache, TiledImage
from models.inference.continuous_batching import ContinuousBatch
from models.inference.request import Request as ModelRequest
from nanovlm.captioner import NO_IMAGE, Captioner
from nanovlm.errors import ImageError
from nanovlm.processing.image_urls import ImageFetcher, is_data_url
from nanovlm.serving.admission import Admission, cancel_on_disconnect, read_body, request_deadline
from nanovlm.serving.chat_format import (
    ModelInputs,
    check_image_tokens,
    parse_messages,
    prepare_inputs,
    preprocess,
)
from nanovlm.serving.engine import Engine
from nanovlm.serving.errors import APIError, as_api_error, refusing
from nanovlm.serving.options import Limits
from nanovlm.serving.protocol import ChatCompletionRequest, MediaURL
from nanovlm.serving.response_formats import ChatFormat
from nanovlm.serving.streaming import EventStreamResponse, ResponseStream, StopStringStreamer, stream_events

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PREPARED = 8  # requests that are preprocessed and not prefilled yet: memory holds their pixels


class ChatService:
    """Answers requests with a model, whatever name of a model they have.

    fetcher and batch_type replace the defaults; without a fetcher remote images are refused.
    """

    def __init__(
        self,
        captioner: Captioner,
        name: str,
        limits: Limits | None = None,
        *,
        fetcher: ImageFetcher | None = None,
        batch_type: Callable[..., ContinuousBatch] = ContinuousBatch,
    ):
        self._warned_of_no_image = False
        self.captioner, self.name, self.limits = captioner, name, limits or Limits()
        new_batch = partial(
            batch_type,
            captioner.inference,
            max_num_seqs=self.limits.max_num_seqs,
            eos_token_id=captioner.tokenizer.eos_token_ids,
            image_cache=ImageCache(self.limits.image_cache) if self.limits.image_cache else None,
            prefix_cache=PrefixCache(self.limits.prefix_cache) if self.limits.prefix_cache else None,
        )
        self.engine = Engine(new_batch)
        self.fetcher = fetcher or ImageFetcher()
        self.admission = Admission(self.limits.max_num_seqs + self.limits.max_pending)
        self.prepared = asyncio.Semaphore(MAX_PREPARED)  # which requests pass in the order of their arrival
        self.threads = ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)), "nanovlm-requests")
        self.context = captioner.processor.cfg.lm_max_position_embeddings
        self.max_chars = self.context * max(map(len, captioner.tokenizer.backend.get_vocab()))

    @property
    def num_waiting(self) -> int:
        """Admitted sequences that do not run yet."""
        return max(0, self.admission.count - self.engine.batch.running)

    def start(self) -> None:
        """Start the engine; call it in the event loop that serves requests."""
        self.engine.start()

    def close(self) -> None:
        """Stop the engine after its current step."""
        if self.engine.alive:
            self.engine.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def complete(self, http_request: Request) -> Response:
        """The response to one request. Whatever goes wrong is an APIError."""
        try:
            return await self._complete(http_request)
        except (Exception, asyncio.CancelledError) as error:
            raise as_api_error(error) from None

    async def _complete(self, http_request: Request) -> Response:
        end = asyncio.get_running_loop().time() + self.limits.timeout
        deadline = partial(request_deadline, end, self.limits.timeout)
        async with AsyncExitStack() as request_scope:  # what it holds is released when the response ends
            async with deadline():
                self.admission.admit(request_scope)
                body = await read_body(http_request, self.limits.max_body)
                request = await self._run(ChatCompletionRequest.parse, body)
                del body  # it may hold megabytes of images, as the request does
                output_format = ChatFormat(uuid.uuid4().hex, self.name)
                work = self._respond(request, output_format, request_scope, deadline)
                response = await cancel_on_disconnect(http_request, work)
            if isinstance(response, EventStreamResponse):
                response.request_scope = request_scope.pop_all()
        return response

    async def _respond(
        self,
        request: ChatCompletionRequest,
        output_format: ChatFormat,
        request_scope: AsyncExitStack,
        deadline: Callable[[], AbstractAsyncContextManager[None]],
    ) -> Response:
        async with AsyncExitStack() as until_prefilled:
            stream = await self._submit(request, request_scope, until_prefilled)
            texts = stream.texts()
            first = await anext(texts)
        if request.stream:
            return EventStreamResponse(
                stream_events(stream, output_format, first, texts, request.stream_options.include_usage, deadline)
            )
        text = first + "".join([new async for new in texts])
        return JSONResponse(output_format.response(text, stream.finish_reason, stream.usage))

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        """Call function(*args) in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def _submit(
        self, request: ChatCompletionRequest, request_scope: AsyncExitStack, until_prefilled: AsyncExitStack
    ) -> ResponseStream:
        """Check and preprocess a request, and submit it to the engine."""
        processor = None
        if is_structured := (schema := request.response_format.required_schema()) is not None:
            make = self.captioner.structured_output.make_processors
            with refusing("response_format"):
                (processor,) = await self._run(make, schema, 1, "response_format")
        sampling = request.sampling().sampling
        inputs = await self._prepare(request, until_prefilled)
        max_tokens = self._max_tokens(request, len(inputs.input_ids))
        sequence = ModelRequest(inputs.input_ids, inputs.images, sampling, max_tokens, processor)
        handle = self.engine.submit(sequence)
        request_scope.callback(handle.cancel)
        streamer = StopStringStreamer(self.captioner.tokenizer, request.stop, is_structured=is_structured)
        return ResponseStream(handle, streamer, len(inputs.input_ids))

    async def _prepare(self, request: ChatCompletionRequest, until_prefilled: AsyncExitStack) -> ModelInputs:
        """The request's prompt; each step in a thread is short."""
        self._check_length(request)
        chat = parse_messages(request.messages, self.captioner.processor.layout.images_in_turns)
        if not chat.image_urls and not self._warned_of_no_image:
            self._warned_of_no_image = True
            logger.warning(NO_IMAGE)
        request.messages.clear()  # from here on only chat holds the encoded images
        files = await self._fetch(chat.image_urls)
        await until_prefilled.enter_async_context(self.prepared)
        processor, options = self.captioner.processor, (self.limits.max_pixels, self.engine.batch.image_cache)
        images: list[TiledImage] = []
        for number, file in enumerate(files, 1):
            arguments = f"image {number}", file, processor, *options, chat.image_urls[number - 1].detail
            with refusing("messages", "invalid_image"):
                images.append(await self._run(preprocess, *arguments))
            check_image_tokens(images, processor)
        return await self._run(prepare_inputs, chat, images, processor)

    def _check_length(self, request: ChatCompletionRequest) -> None:
        """Refuse what cannot fit into the context whatever its tokens are, before it is tokenized."""
        if (n := len(request.text)) > self.max_chars:
            raise self._too_long(f"{n:,} characters")

    async def _fetch(self, urls: Sequence[MediaURL]) -> list[str | bytes]:
        """The remote files of images; data URLs remain as they are, since a thread decodes them faster."""
        files: list[str | bytes] = []
        free_bytes = self.limits.max_body
        for number, media in enumerate(urls, 1):
            with refusing("messages", "invalid_image"):
                files.append(await self._file(media.url, f"image {number}", free_bytes))
            free_bytes -= len(files[-1]) if isinstance(files[-1], bytes) else 0
        return files

    async def _file(self, url: str, name: str, max_bytes: int) -> str | bytes:
        """A data URL as it is, or the file behind another one; ImageError begins with the name."""
        try:
            return url if is_data_url(url) else await self.fetcher.fetch(url, max_bytes)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None

    def _max_tokens(self, request: ChatCompletionRequest, prompt_tokens: int) -> int:
        """How many tokens to generate at most: what the request allows and the context has room for.

        APIError if the prompt alone does not fit.
        """
        room = self.context - prompt_tokens + 1  # the last token is never read
        if room < 1:
            raise self._too_long(f"a prompt of {prompt_tokens} tokens")
        return room if request.max_tokens is None else min(request.max_tokens, room)

    def _too_long(self, what: str) -> APIError:
        limit = f"the model's context (lm_max_position_embeddings={self.context})"
        message = f"messages holds {what}, more than {limit} has room for; shorten it"
        return APIError(400, message, "context_length_exceeded", "messages")
