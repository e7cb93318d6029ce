"""Continuous batching (Yu et al. 2022, Orca): requests join and leave the batch between two decode steps.

Each running request has a slot in a cache of fixed capacity. Its keys and values start at position 0 of the slot, and a
mask says how many are valid. A finished request therefore costs nothing, and a new one is prefilled and copied into a
free slot.
"""

from collections.abc import Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from models.decoding import GREEDY, MAX_NEW_TOKENS, SamplingParams, TokenSampler, finish_reason
from models.errors import InputError, is_out_of_memory
from models.inference.inference_model import InferenceModel
from models.inference.requests import BatchRequest, LogitsProcessor, PrefillError, TokenOutput
from models.inference.serving_caches import (
    CachedPrefix,
    ImageCache,
    PrefixCache,
    SlotCache,
    TiledImage,
    encode_images,
    image_starts,
)
from models.vision_language_model import VisionLanguageModel

MAX_PREFILL_TOKENS = 2048  # in one prefill of several prompts; running requests wait for it
MIN_LENGTH_RATIO = 7 / 8  # shortest to longest prompt of one prefill; more padding would cost more than batching saves


class ContinuousBatch:
    """Generates for many prompts at once: a prompt is prefilled when a slot is free, and frees it when it ends.

    A request's tokens are what `model.generate` gives for its prompt alone, up to the rounding of sums in another
    order. Not thread-safe: nothing may be added or cancelled while a step runs.
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
        self.max_num_seqs = max_num_seqs
        self.image_cache, self.prefix_cache = image_cache, prefix_cache
        self._ends, self._greedy = eos_token_id, TokenSampler(eos_token_id=eos_token_id)
        self.eos_token_id = self._greedy.eos_token_id  # the one that stands for all of them
        self._waiting: dict[Hashable, BatchRequest] = {}
        self._slots: list[BatchRequest | None] = []  # None where a request has ended
        self._cache = SlotCache(max_num_seqs, self.model.cfg.lm_max_position_embeddings)
        self._outputs: list[TokenOutput] = []  # of the current step; an exception leaves them to the next one

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(request is not None for request in self._slots)

    def add(
        self,
        key: Hashable,
        input_ids: Tensor,
        images: Tensor | Sequence[TiledImage] | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: SamplingParams = GREEDY,
        logits_processor: LogitsProcessor | None = None,
    ) -> None:
        """Queue a prompt, ids (T,) and images (N, 3, S, S). InputError if it can never be prefilled.

        As `TiledImage`s with keys, images that the image cache holds are not encoded again, and a prompt that begins
        like an earlier sequence in the prefix cache is prefilled from there on.

        logits_processor changes the logits before each token is chosen, for example to exclude tokens: it is called
        with the request's generated ids and logits (1, vocabulary).
        """
        if key in self._waiting or any(request is not None and request.key == key for request in self._slots):
            raise InputError(f"{key!r} is the key of a request that waits or runs; use another")
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens} is less than 1")
        if input_ids.dim() != 1 or not len(input_ids):
            raise InputError(f"a prompt has the shape (T,), T at least 1, not {tuple(input_ids.shape)}")
        self.model.validate_length(len(input_ids), max_new_tokens)
        if isinstance(images, Tensor):
            images = [TiledImage(images)] if len(images) else []
        inputs, ids = list(images or ()), input_ids.cpu()
        dtype = next((image.tiles.dtype for image in inputs if image.tiles is not None), None)
        self.model.validate_images(input_ids, torch.empty(sum(image.n_tiles for image in inputs), 0, dtype=dtype))
        starts = image_starts(ids, inputs, self.model.image_token_id, self.model.cfg.mp_image_token_length)
        request = BatchRequest(key, ids, inputs, starts, max_new_tokens, sampling)
        if logits_processor is not None or not sampling.is_greedy:
            process = None if logits_processor is None else partial(logits_processor, request.output)
            prompt = ids.masked_fill(ids == self.model.image_token_id, -1)[None]
            request.sampler = TokenSampler(sampling, self._ends, prompt, process)
            if sampling.is_greedy:  # a forced token takes no random number
                request.forced_tokens = getattr(logits_processor, "forced_tokens", None)
        self._waiting[key] = request

    def cancel(self, key: Hashable) -> None:
        """Drop a request, whether it waits or runs. An unknown key is no error."""
        self._waiting.pop(key, None)
        self._outputs = [output for output in self._outputs if output.key != key]
        for slot, request in enumerate(self._slots):
            if request is not None and request.key == key:
                self._end(slot, request)

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """Prefill some of the waiting prompts into free slots, then decode one token of every running request.

        A prefilled prompt gets two tokens in its first step. PrefillError names a prompt that was dropped. A request
        that cannot be decoded ends with `finished="error"`; the others continue. Running out of memory raises the
        allocator's error (see `is_out_of_memory`): cancel some requests and step again. After any of these exceptions
        the batch is intact, and no token is lost.
        """
        self._compact()
        self._outputs += self._prefill(self._next_prompts())
        self._compact()
        self._decode_all()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _next_prompts(self) -> list[BatchRequest]:
        """The first waiting prompt and later ones of about its length, as many as there are free slots.

        A prompt whose beginning is in the prefix cache is prefilled by itself.
        """
        free = self.max_num_seqs - self.running
        chosen: list[BatchRequest] = []
        for request in self._waiting.values():
            if len(chosen) == free:
                break
            lengths = [len(other.input_ids) for other in (*chosen, request)]
            fits = min(lengths) >= MIN_LENGTH_RATIO * max(lengths) and len(lengths) * max(lengths) <= MAX_PREFILL_TOKENS
            if self.prefix_cache is not None and (not chosen or fits):
                request.prefix, request.prefix_length = self.prefix_cache.find(request.input_ids, request.image_starts)
                if request.prefix and not chosen:
                    return [request]
                fits = fits and request.prefix is None
            if not chosen or fits:
                chosen.append(request)
        return chosen

    def _prefill(self, requests: list[BatchRequest]) -> list[TokenOutput]:
        """Prefill prompts into free slots. If several fail together, try the first alone; the others keep waiting."""
        if not requests:
            return []
        try:
            logits = self._prefill_batch(requests)
        except Exception as error:  # a kernel's or Python's error: one prompt must not stop the others
            if len(requests) == 1:
                del self._waiting[requests[0].key]
                raise PrefillError(requests[0].key, error) from error
            logits = None
        if logits is None:
            return self._prefill(requests[:1])
        for request in requests:
            del self._waiting[request.key]
            request.prefix = None
        return self._choose(requests, logits)

    def _prefill_batch(self, requests: list[BatchRequest]) -> Tensor:
        """Logits (B, vocabulary) after each prompt. Padding is on the right, where causal attention ignores it.

        Several prompts begin at their first token, a single one where its prefix ends.
        """
        network = self.model.network  # a change of the weights is noticed here, not at every token
        start, lengths = requests[0].prefix_length, [len(request.input_ids) for request in requests]
        first = len(self._slots)  # there are no holes
        slots = range(first, first + len(requests))
        self._cache.reserve(network, slots.stop, max(lengths), keep=bool(self._slots))
        pad = int(self.model.image_token_id == 0)  # any id but the image token's
        rows = [request.input_ids[start:] for request in requests]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        x = self.model.embed_encoded(ids.to(self.model.device), self._encode_images(requests))
        if (prefix := requests[0].prefix) is not None:
            self._cache.data[:, :, first, :, :start] = prefix.kv[:, :, :, :start]
        last = [length - start - 1 for length in lengths]
        logits = network.run(x, self._cache.data, [start] * len(requests), None, last, slots)
        for request, length in zip(requests, lengths):
            self._slots.append(request)
            request.network, request.length, request.images = network, length, []
        return logits

    def _encode_images(self, requests: Sequence[BatchRequest]) -> Tensor | None:
        """Embeddings (n, C) of the image tokens that are to be prefilled. Images of equal keys are encoded once."""
        n_done = int((requests[0].input_ids[: requests[0].prefix_length] == self.model.image_token_id).sum())
        images = [image for request in requests for image in request.images]
        if sum(image.n_tiles for image in images) * self.model.cfg.mp_image_token_length == n_done:
            return None
        return torch.cat(encode_images(self.model, images, self.image_cache)).flatten(0, 1)[n_done:]

    def _end(self, slot: int, request: BatchRequest) -> None:
        """Free the slot of a request; the prefix cache may keep its keys and values."""
        self._slots[slot] = None
        if self.prefix_cache is None or any(key is None for key, _ in request.image_starts):
            return
        try:
            kv = self._cache.data[:, :, slot, :, : request.length].clone()
        except Exception as error:
            if is_out_of_memory(error):
                return
            raise
        ids = torch.cat([request.input_ids, torch.tensor(request.output, dtype=torch.long)])[: request.length]
        self.prefix_cache.add(CachedPrefix(ids, request.image_starts, kv))

    def _compact(self) -> None:
        """Move the last requests into freed slots, so that a step computes running requests only."""
        while None in self._slots:
            last = self._slots.pop()
            if last is not None:
                hole = self._slots.index(None)
                self._slots[hole] = last
                self._cache.data[:, :, hole] = self._cache.data[:, :, len(self._slots)]

    def _decode_all(self) -> None:
        """Decode one token for each running request, those of one network together.

        A request that has forced tokens to read is decoded by itself.
        """
        groups: dict[Hashable, list[int]] = {}
        for slot, request in enumerate(self._slots):
            if request is not None:
                groups.setdefault(request.network if len(request.unread) == 1 else slot, []).append(slot)
        for slots in groups.values():
            self._decode(slots)

    def _decode(self, slots: Sequence[int]) -> None:
        """Decode one token for the requests in some slots, all of them running and of one network.

        If they fail together, each half is decoded by itself, until only the request that causes the failure ends.
        """
        requests = [request for slot in slots if (request := self._slots[slot]) is not None]
        try:
            logits = self._decode_logits(requests, slots)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if len(requests) == 1:
                self._slots[slots[0]] = None
                self._outputs.append(TokenOutput(requests[0].key, -1, "error", error))
            else:
                middle = len(slots) // 2
                self._decode(slots[:middle])
                self._decode(slots[middle:])
            return
        for request in requests:
            request.length += len(request.unread)
        self._outputs += self._choose(requests, logits)

    def _decode_logits(self, requests: Sequence[BatchRequest], slots: Sequence[int]) -> Tensor:
        """Logits (B, vocabulary) after the last token of each of the requests, which are in these slots."""
        network, lengths = requests[0].network, [request.length for request in requests]
        assert network is not None  # they are prefilled
        ids = torch.tensor([request.unread for request in requests], device=self.model.device)
        self._cache.reserve(network, max(slots) + 1, max(lengths) + ids.size(1), keep=True)
        last = [ids.size(1) - 1] * len(requests)
        return network.run(network.embed_tokens(ids), self._cache.data, lengths, None, last, slots)

    def _choose(self, requests: Sequence[BatchRequest], logits: Tensor) -> list[TokenOutput]:
        """Each request's next token from logits (B, vocabulary), as `generate_tokens` chooses it."""
        outputs = []
        for row, (request, token_id) in enumerate(zip(tuple(requests), self._greedy(logits).tolist())):
            if request.sampler is not None:
                try:
                    token_id = int(request.sampler(logits[row : row + 1]))
                except Exception as error:
                    self._slots[self._slots.index(request)] = None
                    outputs.append(TokenOutput(request.key, -1, "error", error))
                    continue
            outputs.append(self._accept(request, token_id))
            if request.forced_tokens is not None and outputs[-1].finished is None:
                for forced in request.forced_tokens(request.output):
                    if outputs[-1].finished is None:
                        outputs.append(self._accept(request, forced))
        return outputs

    def _accept(self, request: BatchRequest, token_id: int) -> TokenOutput:
        """Add a token to the request's output, which may end it."""
        request.output.append(token_id)
        request.remaining -= 1
        reason = finish_reason(request.output, self.eos_token_id, request.sampling.repetition_detection)
        finished = None if reason == "length" and request.remaining else reason
        if finished:
            self._end(self._slots.index(request), request)
        return TokenOutput(request.key, token_id, finished, None, request.prefix_length)
