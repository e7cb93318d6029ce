"""Streaming of answers: tokens to text that ends at a stop string, and text to server-sent events."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from models.inference.request import TokenOutput
from nanovlm.processing.tokenizer import StreamingDecoder, Tokenizer
from nanovlm.serving.engine import RequestHandle
from nanovlm.serving.errors import as_api_error
from nanovlm.serving.response_formats import ChatFormat, Usage


class StopStringStreamer:
    """Text of one sequence, token by token: whole characters only, and nothing from the first stop string on.

    Text that may be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), *, is_structured: bool = False):
        """An answer that is_structured is incomplete, with the reason "length", if it ends by repeating itself."""
        self.decoder, self.stop_strings = StreamingDecoder(tokenizer), [stop for stop in stop_strings if stop]
        self.eos_token_id = tokenizer.eos_token_id
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._renamed = {"repetition": "length"} if is_structured else {}
        self._pending = ""  # decoded, but not returned yet

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
    """The text of a request's answer, as the engine generates it."""

    def __init__(self, handle: RequestHandle, streamer: StopStringStreamer, num_prompt_tokens: int):
        self.handle, self.streamer, self.num_prompt_tokens = handle, streamer, num_prompt_tokens
        self.num_cached_tokens = 0  # of the prompt

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.streamer.num_tokens, self.num_cached_tokens)

    @property
    def finish_reason(self) -> str | None:
        return self.streamer.finish_reason

    async def texts(self) -> AsyncIterator[str]:
        """New text, which may be empty. An answer that reaches a stop string is cancelled."""
        while not self.finish_reason:
            yield "".join(map(self._feed, await self.handle.outputs()))

    def _feed(self, output: TokenOutput) -> str:
        if self.finish_reason:
            return ""
        self.num_cached_tokens = output.request.n_cached
        text = self.streamer.feed(output.token_id, output.finished)
        if self.finish_reason and not output.finished:
            self.handle.cancel()
        return text


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
    first: str,
    texts: AsyncIterator[str],
    include_usage: bool,
    deadline: Callable[[], AbstractAsyncContextManager[None]],
) -> AsyncIterator[str]:
    """The events of a streamed response. first and texts are of `stream.texts()`.

    An error is the last event: the status has been sent already.
    """
    yield output_format.start()
    new: str | None = first
    try:
        while new is not None:
            for event in output_format.delta(new, stream.finish_reason):
                yield event
            async with deadline():
                new = await anext(texts, None)
    except Exception as error:
        yield output_format.error(as_api_error(error))
        return
    for event in output_format.end(stream.usage, include_usage):
        yield event
