"""Streaming of answers: tokens to text that ends at a stop string, and text to server-sent events."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from models.inference.requests import TokenLogprobs, TokenOutput
from nanovlm.processing.tokenizer import StreamingDecoder, Tokenizer
from nanovlm.serving.engine import RequestHandle
from nanovlm.serving.errors import as_api_error
from nanovlm.serving.response_formats import ChatFormat, TextDelta, Usage


class StopStringStreamer:
    """Text of one sequence, token by token: whole characters only, and nothing from the first stop string on.

    Text that may be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        continued_ids: Sequence[int] = (),
        *,
        is_structured: bool = False,
    ):
        """continued_ids are tokens that the sequence continues: with some tokenizers they decide about a space.

        An answer that is_structured is incomplete, with the reason "length", if it ends because it repeats itself.
        """
        self.decoder, self.stop_strings = StreamingDecoder(tokenizer), [stop for stop in stop_strings if stop]
        self.eos_token_id = tokenizer.eos_token_id
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._renamed = {"repetition": "length"} if is_structured else {}
        self._pending = ""  # decoded, but not returned yet
        for token_id in continued_ids:
            self.decoder.add(token_id)

    def feed(self, token_id: int, finish_reason: str | None = None) -> str:
        """Add a token and return the text that is certain now; sets `finish_reason` when the sequence ends."""
        self.num_tokens += 1
        if token_id != self.eos_token_id:
            self._pending += self.decoder.add(token_id)
        if finish_reason:
            self._pending += self.decoder.rest()
        matches = [
            (self._pending.find(stop) + len(stop), -len(stop)) for stop in self.stop_strings if stop in self._pending
        ]
        if matches:  # the one that is complete first; of two such, the longer one
            end, negative_length = min(matches)
            self.finish_reason = "stop"
            return self._take(end + negative_length)
        if finish_reason:
            self.finish_reason = self._renamed.get(finish_reason, finish_reason)
            return self._take(len(self._pending))
        return self._take(len(self._pending) - max(map(self._prefix_length, self.stop_strings), default=0))

    def _prefix_length(self, stop: str) -> int:
        """The length of the longest prefix of a stop string that the pending text ends with."""
        lengths = range(min(len(stop), len(self._pending)), 0, -1)
        return next((n for n in lengths if self._pending.endswith(stop[:n])), 0)

    def _take(self, n: int) -> str:
        text, self._pending = self._pending[:n], self._pending[n:]
        return text


class ResponseStream:
    """The text of all sequences of one request, as the engine generates it.

    on_prefilled is called once every sequence has its first token: the engine has then released the images.
    """

    def __init__(
        self,
        handle: RequestHandle,
        streamers: Sequence[StopStringStreamer],
        num_prompt_tokens: int,
        on_prefilled: Callable[[], None],
    ):
        self.handle, self.streamers = handle, streamers
        self.num_prompt_tokens, self.on_prefilled = num_prompt_tokens, on_prefilled
        self.num_cached_tokens = 0  # of the prompt, by the first sequence
        self._logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in streamers]  # of tokens not returned yet

    @property
    def num_tokens(self) -> int:
        return sum(streamer.num_tokens for streamer in self.streamers)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_tokens, self.num_cached_tokens)

    @property
    def finish_reasons(self) -> list[str | None]:
        return [streamer.finish_reason for streamer in self.streamers]

    async def texts(self) -> AsyncIterator[dict[int, TextDelta]]:
        """New text by sequence index. A sequence that reaches a stop string is cancelled."""
        while not all(self.finish_reasons):
            new: dict[int, TextDelta] = {}
            for output in await self.handle.outputs():
                self._feed(output, new)
            if all(streamer.num_tokens for streamer in self.streamers):
                self.on_prefilled()
            yield new

    def _feed(self, output: TokenOutput, new: dict[int, TextDelta]) -> None:
        index: Any = output.key
        streamer, logprobs = self.streamers[index], self._logprobs[index]
        if streamer.finish_reason:
            return
        if index == 0:
            self.num_cached_tokens = output.n_cached
        text = streamer.feed(output.token_id, output.finished)
        if output.logprobs and output.finished != "stop":  # the end token has no text
            logprobs.append((output.token_id, output.logprobs))
        delta = TextDelta(text)
        if text or streamer.finish_reason:
            delta = TextDelta(text, tuple(logprobs))
            logprobs.clear()
        new[index] = new.get(index, TextDelta()) + delta
        if streamer.finish_reason and not output.finished:
            self.handle.cancel(index)


class EventStreamResponse(StreamingResponse):
    """Server-sent events. `request_scope` is closed when they end or the client leaves."""

    def __init__(self, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.request_scope = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.request_scope:
            await super().__call__(scope, receive, send)


async def stream_events(
    stream: ResponseStream,
    output_format: ChatFormat,
    first: dict[int, TextDelta],
    texts: AsyncIterator[dict[int, TextDelta]],
    include_usage: bool,
    deadline: Callable[[], AbstractAsyncContextManager[None]],
) -> AsyncIterator[str]:
    """The events of a streamed response. first and texts are of `stream.texts()`.

    An error is the last event: the status has been sent already.
    """
    for event in output_format.start(len(stream.streamers)):
        yield event
    new: dict[int, TextDelta] | None = first
    try:
        while new is not None:
            for index, delta in new.items():
                for event in output_format.delta(index, delta, stream.finish_reasons[index]):
                    yield event
            async with deadline():
                new = await anext(texts, None)
    except Exception as error:
        yield output_format.error(as_api_error(error))
        return
    for event in output_format.end(stream.usage, include_usage):
        yield event
