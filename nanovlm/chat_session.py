"""ChatSession: several questions about the same images, with the KV cache reused between them."""

import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import torch

from models.inference.serving_caches import common_prefix_length
from nanovlm.captioner import NO_IMAGE, Captioner, ImageInputs, Stats, is_one_image
from nanovlm.errors import InputError
from nanovlm.options import CHAT_MAX_NEW_TOKENS, GenerationOptions, generation_options
from nanovlm.processing.video import Video

CHAT_OPTIONS = GenerationOptions(max_new_tokens=CHAT_MAX_NEW_TOKENS)


class ChatSession:
    """A chat about an image, several, a `Video`, or nothing (None); `history` holds the questions and answers so far.

    Each question is laid out with the whole chat before it, and the part that the KV cache holds already is not read
    again: never the images, which come first, and most often nothing but the new question. Sometimes an answer's tokens
    differ from those that its text encodes to; the chat is then read again from there.
    """

    def __init__(self, captioner: Captioner, images: ImageInputs = None):
        self.captioner = captioner
        sources: Any = () if images is None else [images] if is_one_image(images) else images
        shown = [image if isinstance(image, Video) else captioner.load_image(image) for image in sources]
        tiles, self.grids, self.frame_texts = captioner.processor.preprocess_all(shown)
        self.images = torch.cat(tiles) if tiles else None  # (n, 3, S, S)
        self.history: list[tuple[str, str]] = []
        self.tokens_read = 0  # prompt tokens of the last question that the cache did not hold
        self._ids: list[int] = []  # of the chat and its last answer; the first stats.state.length are cached
        self.stats = Stats()  # of the last question

    def ask(
        self, question: str, *, options: GenerationOptions = CHAT_OPTIONS, **changes: Any
    ) -> Generator[str, None, None]:
        """Yield the answer in pieces of whole characters.

        changes are fields of `GenerationOptions`, such as max_new_tokens or temperature. If the caller stops reading,
        history holds the pieces read so far. Raises InputError if the chat with this question exceeds the model's
        context.
        """
        options = generation_options(options, changes)
        if options.start_with:
            raise InputError("start_with is for captions; ask a chat without it")
        if not self.grids:
            warnings.warn(NO_IMAGE, stacklevel=2)
        ids = self.captioner.processor.encode_prompt(self.grids, question, self.history, self.frame_texts)
        limit = self.captioner.inference.cfg.lm_max_position_embeddings
        if len(ids) > limit:
            raise InputError(
                f"{len(ids)} tokens with this question exceed lm_max_position_embeddings={limit}; shorten it, or reset "
                "the chat"
            )
        options = replace(options, max_new_tokens=min(options.max_new_tokens, limit - len(ids) + 1))
        answer = ""
        try:
            for piece in self.captioner.tokenizer.stream(self._generate(ids, options)):
                answer += piece
                yield piece
        finally:
            if self._ids is ids:  # the question has been read
                self.history.append((question, answer))

    def reset(self) -> None:
        """Forget all questions and answers; the images stay."""
        self.history.clear()

    def _generate(self, ids: list[int], options: GenerationOptions) -> Iterator[int]:
        """Yield the answer's ids without its end token, and add them to ids; what the cache holds is not read again."""
        prefix, images, eos = self.stats.state, None, self.captioner.tokenizer.eos_token_id
        held = [] if prefix is None else self._ids[: prefix.length]
        cached = common_prefix_length(torch.tensor(held), torch.tensor(ids[:-1]))
        if self.images is not None and self.captioner.inference.image_token_id in ids[cached:]:
            cached, images = 0, self.images  # images are read all together
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "images": images}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["prefix"] = prefix.first(cached) if cached else None
        self.tokens_read, stats = len(ids) - cached, Stats()
        for (chosen,) in self.captioner.generate_ids(lambda: inputs, options, stats=stats):
            self._ids, self.stats = ids, stats
            if chosen == eos:
                return
            ids.append(chosen)  # enters the cache when the next one is requested
            yield chosen
