"""ChatSession: several questions about the same images, with the KV cache reused between them."""

import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.decoding import TokenSampler, generate_tokens
from models.inference.serving_caches import common_prefix_length
from models.vision_language_model import PrefillState
from nanovlm.captioner import NO_IMAGE, Captioner, ImageInput
from nanovlm.errors import InputError
from nanovlm.options import CHAT_MAX_NEW_TOKENS, GenerationOptions, generation_options
from nanovlm.processing.video import Video

CHAT_OPTIONS = GenerationOptions(max_new_tokens=CHAT_MAX_NEW_TOKENS)


class ChatSession:
    """A chat about images, a `Video`, or nothing; `history` holds the questions and answers so far.

    Each question is laid out with the whole chat before it, and the part that the KV cache holds already is not read
    again: never the images, which come first, and most often nothing but the new question. Sometimes an answer's tokens
    differ from those that its text encodes to; the chat is then read again from there.
    """

    def __init__(self, captioner: Captioner, images: Sequence[ImageInput] = ()):
        self.captioner = captioner
        shown = [image if isinstance(image, Video) else captioner.load_image(image) for image in images]
        tiles, self.grids, self.frame_texts = captioner.processor.preprocess_all(shown)
        self.images = torch.cat(tiles) if tiles else None  # (n, 3, S, S)
        self.history: list[tuple[str, str]] = []
        self.tokens_read = 0  # prompt tokens of the last question that the cache did not hold
        self._cached_ids: list[int] = []  # an interrupted answer may leave one token more in the cache
        self._prefix: PrefillState | None = None

    def ask(
        self, question: str, *, options: GenerationOptions = CHAT_OPTIONS, **changes: Any
    ) -> Generator[str, None, None]:
        """Yield the answer in pieces of whole characters.

        changes are fields of `GenerationOptions`, such as max_new_tokens or temperature. If the caller stops reading,
        history holds the pieces read so far. Raises InputError if the chat with this question exceeds the model's
        context.
        """
        options = generation_options(options, changes)
        if options.start_with or options.trim_incomplete:
            raise InputError("start_with and trim_incomplete are for captions; a chat has neither")
        if not self.grids:
            warnings.warn(NO_IMAGE, stacklevel=2)
        ids = self.captioner.processor.encode_prompt(self.grids, question, self.history, self.frame_texts)
        limit = self.captioner.inference.cfg.lm_max_position_embeddings
        if len(ids) > limit:
            raise InputError(
                f"{len(ids)} tokens with this question exceed lm_max_position_embeddings={limit}; shorten it, or reset "
                "the chat"
            )
        logits, answer = self._prefill(ids), ""
        try:
            n = min(options.max_new_tokens, limit - len(ids) + 1)
            for piece in self.captioner.tokenizer.stream(
                self._generate(ids, logits, replace(options, max_new_tokens=n))
            ):
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
        cached = common_prefix_length(torch.tensor(self._cached_ids), torch.tensor(ids[:-1]))
        images = None
        if self.images is not None and model.image_token_id in ids[cached:]:  # images are read all together
            cached, images = 0, self.images.to(model.device)
        prefix = self._prefix.first(cached) if self._prefix is not None and cached else None
        new_ids = torch.tensor([ids[cached:]], device=model.device)
        logits, self._prefix = model.prefill(new_ids, images, prefix=prefix)
        self._cached_ids, self.tokens_read = list(ids), new_ids.size(1)
        return logits

    @torch.inference_mode()
    def _generate(self, ids: list[int], logits: Tensor, options: GenerationOptions) -> Iterator[int]:
        """Yield the answer's ids without its end token; each enters the cache when the next one is requested."""
        model, prompt = self.captioner.inference, torch.tensor([ids])

        def step(chosen: Tensor) -> Tensor:
            assert self._prefix is not None  # the prefill has set it
            logits, self._prefix = model.decode(chosen, self._prefix)
            self._cached_ids.append(int(chosen))
            return logits

        prompt = prompt.masked_fill(prompt == model.image_token_id, -1)
        tokenizer = self.captioner.tokenizer
        sampler = TokenSampler(options.sampling(tokenizer.encode), tokenizer.eos_token_ids, prompt)
        for chosen in generate_tokens(logits, step, sampler, options.max_new_tokens):
            if int(chosen) == sampler.eos_token_id:
                return
            yield int(chosen)
