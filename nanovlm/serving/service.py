"""The chat service: takes a request through its limits, preprocessing, the engine and back to the client."""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from models.inference.continuous_batching import ContinuousBatch
from models.inference.inference_model import InferenceModel
from models.inference.serving_caches import ImageCache, PrefixCache, TiledImage
from nanovlm.captioner import NO_IMAGE, Captioner
from nanovlm.errors import ImageError
from nanovlm.processing.image_urls import ImageFetcher, is_data_url
from nanovlm.serving.admission import (
    Admission,
    Budget,
    FairThreads,
    PixelReservation,
    cancel_on_disconnect,
    read_body,
    request_deadline,
)
from nanovlm.serving.chat_format import (
    ModelInputs,
    check_image_tokens,
    parse_messages,
    prepare_inputs,
    preprocess,
)
from nanovlm.serving.engine import Engine, SequenceRequest
from nanovlm.serving.errors import APIError, as_api_error, refusing
from nanovlm.serving.options import Limits
from nanovlm.serving.protocol import ChatCompletionRequest, MediaURL
from nanovlm.serving.response_formats import ChatFormat
from nanovlm.serving.streaming import EventStreamResponse, ResponseStream, StopStringStreamer, stream_events

logger = logging.getLogger(__name__)

PIXEL_BUDGET_BYTES = 2**28  # of images that are decoded and not prefilled yet, as float32


class ChatService:
    """Answers requests with a model and, by their names, with its adapters, which `with_adapter` made of it.

    A request that names none of them is answered by the first adapter or else the model.
    fetcher, batch_type and pixel_budget_bytes replace the defaults; without a fetcher remote images are refused.
    """

    def __init__(
        self,
        captioner: Captioner,
        name: str,
        limits: Limits | None = None,
        *,
        fetcher: ImageFetcher | None = None,
        batch_type: Callable[..., ContinuousBatch] = ContinuousBatch,
        pixel_budget_bytes: int = PIXEL_BUDGET_BYTES,
        adapters: Mapping[str, InferenceModel] | None = None,
    ):
        self._warned_of_no_image = False
        self.captioner, self.base_name, self.limits = captioner, name, limits or Limits()
        self.adapters = adapters or {}
        self.names = [*self.adapters, name]
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
        capacity = self.limits.max_num_seqs + self.limits.max_pending
        self.admission = Admission(capacity, reserved=capacity // 16)
        image_bytes = captioner.processor.max_tiles_per_image * 3 * captioner.processor.cfg.vit_img_size**2 * 4
        self.pixel_budget = Budget(max(1, pixel_budget_bytes // image_bytes), reserved=1)
        self.body_budget = Budget(self.limits.max_body * capacity, self.limits.max_body * (capacity // 16))
        self.decoding_budget = Budget(self.limits.max_num_seqs, reserved=self.limits.max_num_seqs // 16)
        self.threads = FairThreads(max(2, min(4, os.cpu_count() or 1)))
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
        self.threads.shutdown()

    async def complete(self, http_request: Request) -> Response:
        """The response to one request. Whatever goes wrong is an APIError."""
        try:
            return await self._complete(http_request)
        except (Exception, asyncio.CancelledError) as error:
            raise as_api_error(error) from None

    async def _complete(self, http_request: Request) -> Response:
        client = http_request.client.host if http_request.client else ""
        end = asyncio.get_running_loop().time() + self.limits.timeout
        deadline = partial(request_deadline, end, self.limits.timeout)
        async with AsyncExitStack() as request_scope:  # what it holds is released when the response ends
            async with deadline():
                with ExitStack() as place:  # only a complete body holds a place: slow senders keep nobody out
                    self.admission.admit(client, 1, place)
                body = await read_body(http_request, self.limits.max_body, self.body_budget, client)
                self.admission.admit(client, 1, request_scope)
                request = await self.threads.run(client, ChatCompletionRequest.parse, body, client)
                del body  # it may hold megabytes of images, as the request does
                output_format = ChatFormat(uuid.uuid4().hex, self.model_name(request.model))
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
        stream = await self._submit(request, request_scope)
        texts = stream.texts()
        first = await anext(texts)
        if request.stream:
            return EventStreamResponse(
                stream_events(stream, output_format, first, texts, request.stream_options.include_usage, deadline)
            )
        text = first + "".join([new async for new in texts])
        return JSONResponse(output_format.response(text, stream.finish_reason, stream.usage))

    async def _submit(self, request: ChatCompletionRequest, request_scope: AsyncExitStack) -> ResponseStream:
        """Check and preprocess a request, and submit it to the engine."""
        model = self.model_name(request.model)
        processor = None
        if is_structured := (schema := request.response_format.required_schema()) is not None:
            make = partial(self.captioner.structured_output.make_processors, untrusted=True)
            with refusing("response_format"):
                (processor,) = await self.threads.run(request.client, make, schema, 1, "response_format")
        options = request.sampling()
        sampling = await self.threads.run(request.client, options.sampling, self.captioner.tokenizer.encode)
        inputs, on_prefilled = await self._prepare(request, request_scope)
        max_tokens, client = self._max_tokens(request, len(inputs.input_ids)), request.client
        await self.decoding_budget.acquire(client)
        request_scope.callback(self.decoding_budget.release, client)
        handle = self.engine.submit(
            SequenceRequest(
                inputs.input_ids, inputs.images, max_tokens, sampling, processor, client, self.adapters.get(model)
            )
        )
        request_scope.callback(handle.cancel)
        streamer = StopStringStreamer(self.captioner.tokenizer, request.stop, is_structured=is_structured)
        return ResponseStream(handle, streamer, len(inputs.input_ids), on_prefilled)

    async def _prepare(
        self, request: ChatCompletionRequest, request_scope: AsyncExitStack
    ) -> tuple[ModelInputs, Callable[[], None]]:
        """The request's prompt, and what to call once it is prefilled; each step in a thread is short."""
        self._check_length(request)
        chat = parse_messages(request.messages, self.captioner.processor.layout.images_in_turns)
        if not chat.image_urls and not self._warned_of_no_image:
            self._warned_of_no_image = True
            logger.warning(NO_IMAGE)
        request.messages.clear()  # from here on only chat holds the encoded images
        files = await self._fetch(chat.image_urls)
        reservation = PixelReservation(self.pixel_budget, request.client)
        request_scope.callback(reservation.release)
        await reservation.acquire(len(files))
        processor, encoder = self.captioner.processor, self.model_name(request.model)
        options = self.limits.max_pixels, self.engine.batch.image_cache, encoder
        images: list[TiledImage] = []
        for number, file in enumerate(files, 1):
            arguments = f"image {number}", file, processor, *options, chat.image_urls[number - 1].detail
            with refusing("messages", "invalid_image"):
                images.append(await reservation.run(self.threads, preprocess, *arguments))
            check_image_tokens(images, processor)
        return await self.threads.run(request.client, prepare_inputs, chat, images, processor), reservation.release

    def _check_length(self, request: ChatCompletionRequest) -> None:
        """Refuse what cannot fit into the context whatever its tokens are, before it is tokenized."""
        if (n := len(request.text)) > self.max_chars:
            raise self._too_long(f"{n:,} characters")

    def model_name(self, asked: str | None) -> str:
        """The name of the model that answers a request for one of this name."""
        return asked if asked in self.names else self.names[0]

    def model_not_found(self, name: str) -> APIError:
        names = ", ".join(map(repr, self.names))
        return APIError(404, f"no model {name!r} here, only {names}", "model_not_found", "model")

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
