"""ChatSession: several questions about the same images, with the KV cache reused between them."""

import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from models.decoding import SamplingParams, generate_tokens, token_presence_mask
from models.vision_language_model import PrefillState
from nanovlm.captioner import NO_IMAGE, Captioner, ImageInput
from nanovlm.errors import InputError
from nanovlm.options import Generation, SamplingKwargs


class ChatSession:
    """A chat about images, or about none; `history` holds the questions and answers so far.

    Each question is laid out with the whole chat before it, and the part that the KV cache holds already is not read
    again: never the images, which come first, and most often nothing but the new question. Sometimes an answer's tokens
    differ from those that its text encodes to; the chat is then read again from there.
    """

    def __init__(self, captioner: Captioner, images: Sequence[ImageInput] = ()):
        self.captioner = captioner
        tiles = [captioner.processor.preprocess(captioner.load_image(image)) for image in images]
        self.grids = [grid for _, grid in tiles]
        self.images = torch.cat([one for one, _ in tiles]) if tiles else None  # (n, 3, S, S)
        self.history: list[tuple[str, str]] = []
        self.tokens_read = 0  # prompt tokens of the last question that the cache did not hold
        self._cached_ids: list[int] = []  # an interrupted answer may leave one token more in the cache
        self._prefix: PrefillState | None = None

    def ask(self, question: str, **options: Unpack[SamplingKwargs]) -> Generator[str, None, None]:
        """Yield the answer in pieces of whole characters.

        options are max_new_tokens, sampling, and the fields of `SamplingParams` such as temperature. If the caller
        stops reading, history holds the pieces read so far. Raises InputError if the chat with this question exceeds
        the model's context.
        """
        generation = Generation.from_kwargs(options, ("max_new_tokens", "sampling"))
        if not self.grids:
            warnings.warn(NO_IMAGE, stacklevel=2)
        ids = self.captioner.processor.encode_prompt(self.grids, question, self.history)
        limit = self.captioner.inference.cfg.lm_max_position_embeddings
        if len(ids) > limit:
            raise InputError(
                f"{len(ids)} tokens with this question exceed lm_max_position_embeddings={limit}; shorten it, or reset "
                "the chat"
            )
        logits, answer = self._prefill(ids), ""
        try:
            max_new_tokens = min(generation.max_new_tokens, limit - len(ids) + 1)
            new_ids = self._generate(ids, logits, max_new_tokens, generation.sampling)
            for piece in self.captioner.tokenizer.stream(new_ids):
                answer += piece
                yield piece
        finally:
            self.history.append((question, answer))

    def reset(self) -> None:
        """Forget all questions and answers; the images stay."""
        self.history.clear()

    @torch.inference_mode()
    def _prefill(self, ids: list[int]) -> Tensor:
        """The logits (1, vocabulary) after ids; only what the cache does not hold is read."""
        model = self.captioner.inference
        cached = 0
        while cached < min(len(self._cached_ids), len(ids) - 1) and self._cached_ids[cached] == ids[cached]:
            cached += 1
        images = None
        if self.images is not None and model.image_token_id in ids[cached:]:  # images are read all together
            cached, images = 0, self.images.to(model.device)
        prefix = self._prefix.first(cached) if self._prefix is not None and cached else None
        new_ids = torch.tensor([ids[cached:]], device=model.device)
        logits, self._prefix = model.prefill(new_ids, images, prefix=prefix)
        self._cached_ids, self.tokens_read = list(ids), new_ids.size(1)
        return logits

    @torch.inference_mode()
    def _generate(self, ids: list[int], logits: Tensor, max_new_tokens: int, sampling: SamplingParams) -> Iterator[int]:
        """Yield the answer's ids without its end token; each enters the cache when the next one is requested."""
        model, ends = self.captioner.inference, self.captioner.tokenizer.eos_token_ids
        seen = None
        if sampling.repetition_penalty != 1:
            prompt = torch.tensor([ids], device=logits.device)
            seen = token_presence_mask(prompt, logits.size(-1), prompt != model.image_token_id)

        def step(chosen: Tensor) -> Tensor:
            assert self._prefix is not None  # the prefill has set it
            logits, self._prefix = model.decode(chosen, self._prefix)
            self._cached_ids.append(int(chosen))
            return logits

        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": ends, "seen": seen}
        for chosen in generate_tokens(logits, step, sampling=sampling, **options):
            if int(chosen) == ends[0]:
                return
            yield int(chosen)
