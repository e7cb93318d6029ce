"""Continuous batching (Yu et al. 2022, Orca): requests join and leave the batch between two decode steps.

Each running request has a slot in a cache of fixed capacity. Its keys and values start at position 0 of the slot. A
finished request therefore costs nothing, and a new one is prefilled into a free slot.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.common.errors import InputError, is_out_of_memory
from models.common.options import GREEDY, MAX_NEW_TOKENS, SamplingParams
from models.decoding import TokenSampler, finish_reason
from models.inference.caches import (
    MIN_PREFIX_TOKENS,
    CachedPrefix,
    ImageCache,
    PrefixCache,
    TiledImage,
    common_prefix,
    encode_images,
)
from models.inference.inference_model import InferenceModel
from models.inference.kernel_network import empty_cache
from models.vision_language_model import VisionLanguageModel

MAX_PREFILL_TOKENS = 2048  # of several prompts in one step; running requests wait for them
MAX_PADDING = 16  # new tokens, or an eighth of them, by which the prompts of one prefill may differ
REGROWTH = 1 / 8  # requests, by which a batch that memory has limited grows with each answer
SLOT_STEP = 64  # tokens; the capacity of a slot is a multiple of it


# (ids generated so far, logits (1, vocabulary)) -> logits. An optional method forced_tokens(ids) returns the ids that
# alone can follow.
Grammar = Callable[[list[int], Tensor], Tensor]


@dataclass(eq=False)
class Request:
    """A prompt and its answer, which a `ContinuousBatch` fills in. It is used once."""

    ids: Sequence[int]
    images: Sequence[TiledImage] = ()  # in reading order; dropped when the request has ended
    sampling: SamplingParams = GREEDY  # its seed belongs to this request alone
    max_new_tokens: int = MAX_NEW_TOKENS
    grammar: Grammar | None = None
    name: Any = None  # of the caller
    error: Exception | None = None  # why there is no answer
    output: list[int] = field(default_factory=list)  # generated ids, the end token included
    finished: str | None = None  # stop, length, repetition, error or cancelled
    n_cached: int = 0  # tokens of the prompt that were not computed, as their keys and values were known
    # The rest belongs to the batch:
    starts: Sequence[tuple[Hashable, int]] = ()  # each image's key, and the position of its first token
    sampler: TokenSampler | None = None  # None for the most likely token, which all such requests choose together
    length: int = 0  # tokens in the KV cache
    stream: Iterator[Tensor] | None = None  # of an edited model's own generation, which has its own cache

    def __post_init__(self) -> None:
        if self.error is not None:
            self.finished = "error"

    @property
    def tokens(self) -> list[int]:
        return [*self.ids, *self.output]

    @property
    def unread(self) -> list[int]:
        """The output's tokens that the KV cache lacks: the last one, and any forced tokens before it."""
        return self.output[self.length - len(self.ids) :]


@dataclass(frozen=True)
class TokenOutput:
    """The next token of a request, or its error."""

    request: Request
    token_id: int  # -1 with an error
    finished: str | None = None  # why it was the last token
    error: Exception | None = None


class ContinuousBatch:
    """Generates for many requests at once: a prompt is prefilled when a slot is free, and frees it when it ends.

    A request's tokens are what `model.generate` gives for its prompt alone, up to the rounding of sums in another
    order. Prompts that begin alike are computed once: the keys and values of a running request, or of one in the
    prefix cache, are copied. Not thread-safe: nothing may be added or cancelled while a step runs.

    Of an edited model (`models.inference.proof`) each prompt is answered alone, by the model's own `stream`: an edit
    may count padding, or see other tokens than those before it.
    """

    def __init__(
        self,
        model: VisionLanguageModel | InferenceModel,
        *,
        max_num_seqs: int = 16,
        eos_token_id: int | Sequence[int] | None = None,
        image_cache: ImageCache | None = None,
        prefix_cache: PrefixCache | None = None,
    ):
        if max_num_seqs < 1:
            raise InputError(f"max_num_seqs={max_num_seqs} is less than 1")
        self.model = model if isinstance(model, InferenceModel) else InferenceModel(model)
        self.max_num_seqs = max_num_seqs  # the limit is lower without memory for all
        self._limit = float(max_num_seqs)
        self.image_cache = image_cache
        self.prefix_cache = prefix_cache
        self._ends = eos_token_id
        self._greedy = TokenSampler(eos_token_id=eos_token_id)
        self.eos_token_id = self._greedy.eos_token_id  # the one that stands for all of them
        self._waiting: list[Request] = []
        self._slots: list[Request] = []
        self._streamed: list[Request] = []  # running requests without a slot: those of an edited model
        self._network = self.model.network  # a change of the weights is noticed by the next prefill
        self._cache = empty_cache(self._network, 0, 0)  # (n_blocks, 2, slots, n_kv_heads, capacity, head_dim)
        self._outputs: list[TokenOutput] = []  # of the current step

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._slots) + len(self._streamed)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return self._cache[:, :, :1, :, :1].nbytes

    def add(self, request: Request) -> None:
        """Queue a request. InputError if it can never be prefilled."""
        ids = request.ids
        images = request.images
        sampling = request.sampling
        if request.output or request.finished or request in self._waiting + self._slots + self._streamed:
            raise InputError("a request is used once; make another")
        if request.max_new_tokens < 1 or not ids:
            raise InputError(f"max_new_tokens={request.max_new_tokens} and {len(ids)} ids: each is at least 1")
        self.model.cfg.validate_length(len(ids), request.max_new_tokens)
        n_tiles = [image.n_tiles for image in images]
        dtype = next((image.tiles.dtype for image in images if image.tiles is not None), None)
        prompt = torch.tensor([ids])
        image_token = self.model.image_token_id
        self._network.model.validate_images(prompt, torch.empty(sum(n_tiles), 0, dtype=dtype))
        positions = [i for i, token_id in enumerate(ids) if token_id == image_token] + [len(ids)]
        first = [sum(n_tiles[:i]) * self.model.cfg.mp_image_token_length for i in range(len(images))]
        request.starts = [(image.key, positions[n]) for image, n in zip(images, first)]
        if request.grammar is not None or not sampling.is_greedy:
            process = None if request.grammar is None else partial(request.grammar, request.output)
            counted = prompt.masked_fill(prompt == image_token, -1)
            request.sampler = TokenSampler(sampling, self._ends, counted, process)
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request. One that has ended or is unknown is no error."""
        if request in self._waiting + self._slots + self._streamed:
            request.finished = "cancelled"
        self._compact()

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Decode one token of every running request, then prefill some of the waiting prompts into free slots.

        A request that cannot be computed ends with an error, and the others continue. Without memory for all of them
        a prompt waits until others have ended, and the last running request returns to the queue, to be computed
        again; a request that is alone and does not fit ends with the allocator's error (see `is_out_of_memory`).
        """
        for request in self._streamed:
            self._read_stream(request)
        forced = [request for request in self._slots if len(request.unread) > 1]
        try:
            for group in ([request for request in self._slots if request not in forced], *([one] for one in forced)):
                self._compute(group, self._decode)
        except MemoryError:
            self._compact()
            if len(self._slots) > 1:  # no other request may take the slot of the last one
                request = self._slots.pop()
                request.length = 0
                self._limit = len(self._slots)
                self._waiting.insert(0, request)
        self._compact()
        if self._waiting and self.running < int(self._limit):
            self._start_requests()
        self._compact()
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _start_requests(self) -> None:
        """Prefill waiting prompts, or begin to stream them, by the model as it is now."""
        try:
            self._network = self.model.network
        except Exception as error:
            for request in self._waiting:
                self._fail(request, error)
            return
        while self._network.is_edited and self._waiting and self.running < int(self._limit):
            self._streamed.append(request := self._waiting.pop(0))
            self._read_stream(request)
        budget = MAX_PREFILL_TOKENS
        try:
            while prompts := self._next_group(budget):
                budget -= sum(len(request.tokens) - request.n_cached for request in prompts)
                self._compute([*prompts], partial(self._prefill, prompts))
        except MemoryError:
            self._limit = len(self._slots)

    def _read_stream(self, request: Request) -> None:
        """Add the next token of an edited model's own generation."""
        try:
            if request.stream is None:
                request.stream = self._stream(request)
            ids = next(request.stream, self.eos_token_id)  # an edit may end it without an end token
            if ids is None:
                raise InputError("the edited model ended its answer, and there is no token that says so")
            self._accept(request, int(ids))
        except Exception as error:
            self._fail(request, error)

    def _stream(self, request: Request) -> Iterator[Tensor]:
        """The ids of a request as the model's own `stream` chooses them."""
        model = self._network.model
        for image in request.images:
            if image.tiles is None:
                if self.image_cache is not None:
                    self.image_cache.drop(image.key)
                raise InputError("an image was encoded before the model was edited; ask about it once more")
        tiles = [image.tiles for image in request.images if image.tiles is not None]
        return model.stream(
            torch.tensor([request.ids], device=model.device),
            torch.cat(tiles).to(model.device) if tiles else None,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            eos_token_id=self._ends,
            logits_processor=None if request.grammar is None else partial(request.grammar, request.output),
        )

    def _compute(self, requests: Sequence[Request], forward: Callable[[Sequence[Request]], Tensor]) -> None:
        """Choose the next token of requests, running or waiting ones, by the logits that forward gives.

        If they fail together, each is computed alone, and ends with its error. MemoryError if others need the memory.
        """
        if not requests:
            return
        is_waiting = requests[0].length == 0
        is_alone = len(requests) == 1
        try:
            logits = forward(requests)
            chosen = self._greedy(logits).tolist()
        except Exception as error:
            others = len(self._slots) * is_alone if is_waiting else len(self._slots) - 1
            if others and is_out_of_memory(error):
                raise MemoryError from error
            if is_alone:
                self._fail(requests[0], error)
            else:
                for request in requests:
                    self._compute([request], forward)
            return
        for request in requests:
            request.length = len(request.tokens)
        if is_waiting:
            self._waiting = [request for request in self._waiting if request not in requests]
            self._slots += requests
        for row, (request, token_id) in enumerate(zip(requests, chosen)):
            try:
                if request.sampler is not None:
                    token_id = int(request.sampler(logits[row : row + 1]))
                self._accept(request, token_id)
                forced_tokens = getattr(request.grammar, "forced_tokens", None)
                if forced_tokens is not None and request.sampling.is_greedy:  # a forced token takes no random number
                    for forced in () if request.finished else forced_tokens(request.output):
                        if not request.finished:
                            self._accept(request, forced)
            except Exception as error:
                self._fail(request, error)

    def _decode(self, requests: Sequence[Request]) -> Tensor:
        """Logits (B, vocabulary) after the unread tokens of running requests."""
        lengths = [request.length for request in requests]
        n_new = len(requests[0].unread)
        ids = torch.tensor([request.unread for request in requests], device=self.model.device)
        self._reserve(len(self._slots), max(lengths) + n_new)
        slots = [self._slots.index(request) for request in requests]
        return self._network.decode_tokens(ids, self._cache, lengths, slots)

    def _next_group(self, budget: int) -> dict[Request, Tensor | None]:
        """Prompts to prefill together, with the keys and values that are known of their beginnings, all as long.

        They are the first waiting prompt and later ones of about as many new tokens. A prompt that begins like one of
        the group waits for its keys and values.
        """
        group: dict[Request, Tensor | None] = {}
        new: list[int] = []  # tokens of each
        start = 0
        for request in self._waiting:
            if self.running + len(group) >= int(self._limit):
                break
            n_cached, kv = self._find_prefix(request)
            begins_alike = (common_prefix(request.ids, request.starts, r.ids, r.starts) for r in group)
            if max(begins_alike, default=0) - n_cached >= MIN_PREFIX_TOKENS:
                continue
            lengths = [*new, len(request.tokens) - n_cached]
            if len(lengths) * max(lengths) > budget and (group or budget < MAX_PREFILL_TOKENS):
                break
            start = start if group else n_cached
            if n_cached == start and max(lengths) - min(lengths) <= max(MAX_PADDING, max(lengths) // 8):
                group[request] = kv
                request.n_cached = n_cached
                new = lengths
        return group

    def _find_prefix(self, request: Request) -> tuple[int, Tensor | None]:
        """How many leading tokens of a prompt are known, at most all but the last, and their keys and values."""
        tokens = request.tokens
        length, kv = (0, None) if self.prefix_cache is None else self.prefix_cache.find(tokens, request.starts)
        for slot, other in enumerate(self._slots):
            if (n := common_prefix(tokens, request.starts, other.ids, other.starts)) > length:
                length = n
                kv = self._cache[:, :, slot]
        return max(0, min(length, len(tokens) - 1)), kv

    def _prefill(self, known: Mapping[Request, Tensor | None], requests: Sequence[Request]) -> Tensor:
        """Logits (B, vocabulary) after prompts, with what is known of them."""
        network = self._network
        start = requests[0].n_cached
        slots = range(len(self._slots), len(self._slots) + len(requests))
        self._reserve(slots.stop, max(len(request.tokens) for request in requests))
        for slot, request in zip(slots, requests):
            if (kv := known[request]) is not None:
                self._cache[:, :, slot, :, :start] = kv[:, :, :, :start]
        image_token = self.model.image_token_id
        shown = [request for request in requests if image_token in request.ids[start:]]
        encode_images(network, [image for request in shown for image in request.images], self.image_cache)
        rows = []
        for request in requests:
            embeds = None
            if request in shown:
                parts = torch.cat([image.embeds for image in request.images if image.embeds is not None])
                embeds = parts.flatten(0, 1)[request.ids[:start].count(image_token) :]
            ids, output = (torch.tensor([x], dtype=torch.long, device=self.model.device) for x in (
                request.ids[start:], request.tokens[max(start, len(request.ids)) :],
            ))  # fmt: skip
            x = network.embed_encoded(ids, embeds)
            if output.numel():  # of a request that starts again; an image token in it is an ordinary one
                x = torch.cat([x, network.embed_tokens(output)], dim=1)
            rows.append(x[0])
        return network.prefill(rows, self._cache, start, slots)

    def _reserve(self, n_slots: int, n_tokens: int) -> None:
        """Make room for n_slots of n_tokens, and to grow; those of the running requests keep their contents."""
        old = self._cache
        n_kept = len(self._slots)
        if n_slots <= old.size(2) and n_tokens <= old.size(4):
            return
        if n_kept:
            n_slots = min(2 * n_slots, self.max_num_seqs) if n_slots > old.size(2) else n_slots
            n_tokens = max(n_tokens, old.size(4) * 5 // 4) if n_tokens > old.size(4) else old.size(4)
        limit = self.model.cfg.lm_max_position_embeddings
        self._cache = empty_cache(self._network, n_slots, min(-(-n_tokens // SLOT_STEP) * SLOT_STEP, limit))
        if n_kept:
            self._cache[:, :, :n_kept, :, : old.size(4)] = old[:, :, :n_kept]

    def _accept(self, request: Request, token_id: int) -> None:
        """Add a token to the request's output, which may end it."""
        request.output.append(token_id)
        reason = finish_reason(request.output, self.eos_token_id, request.sampling.repetition_detection)
        if reason != "length" or len(request.output) == request.max_new_tokens:
            request.finished = reason
        self._outputs.append(TokenOutput(request, token_id, request.finished))

    def _fail(self, request: Request, error: Exception) -> None:
        self._waiting = [other for other in self._waiting if other is not request]
        request.finished = "error"
        request.error = error
        request.images = ()
        self._outputs.append(TokenOutput(request, -1, "error", error))

    @torch.inference_mode()
    def _compact(self) -> None:
        """Forget requests that have ended, and move the last ones to their slots: a step computes no others."""
        self._waiting = [request for request in self._waiting if request.finished is None]
        self._streamed = [request for request in self._streamed if request.finished is None]
        for slot in reversed(range(len(self._slots))):
            if (request := self._slots[slot]).finished is None:
                continue
            self._limit = min(self._limit + REGROWTH, self.max_num_seqs)
            self._keep_prefix(slot, request)
            request.images = ()
            last = self._slots.pop()
            if last is not request:
                self._slots[slot] = last
                self._cache[:, :, slot] = self._cache[:, :, len(self._slots)]

    def _keep_prefix(self, slot: int, request: Request) -> None:
        """Give the keys and values of a request that has ended to the prefix cache, if memory allows it."""
        if self.prefix_cache is None or request.error is not None:
            return
        try:
            kv = self._cache[:, :, slot, :, : request.length].clone()
        except Exception as error:
            if is_out_of_memory(error):
                return
            raise
        self.prefix_cache.add(CachedPrefix(request.tokens[: request.length], request.starts, kv))
