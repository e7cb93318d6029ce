"""ChatSession: several questions about the same images, with the KV cache reused between them."""

import sys
import warnings
from collections.abc import Generator
from itertools import chain
from typing import Any

from models.inference.caches import PrefixCache
from nanovlm.captioner import Captioner
from nanovlm.errors import InputError
from nanovlm.options import CHAT_MAX_NEW_TOKENS, GenerationOptions, generation_options
from nanovlm.processing.conversation import dialogue
from nanovlm.request_runner import NO_IMAGE, ImageInputs, Stats


class ChatSession:
    """A chat about an image, several, a `Video`, or nothing (None); `history` holds the questions and answers so far.

    Each question is laid out with the whole chat before it, and the part that the KV cache holds already is not read
    again: never the images, which come first, and most often nothing but the new question. Sometimes an answer's tokens
    differ from those that its text encodes to; the chat is then read again from there.
    """

    def __init__(self, captioner: Captioner, images: ImageInputs = None):
        self.captioner = captioner
        self.shown = captioner.processor.prepare(captioner.load_images(images))
        tiled = [part for part in self.shown if not isinstance(part, str)]  # a video has texts, too
        self._tiles = [(image, image.tiles) for image in tiled]  # to encode them again if the model is edited
        self.batch = captioner.batch(1, prefix_cache=PrefixCache(sys.maxsize, max_entries=1))  # of the last turn
        self.history: list[tuple[str, str]] = []
        self.stats = Stats()  # of the last question

    @property
    def tokens_read(self) -> int:
        """Prompt tokens of the last question that the cache did not hold."""
        return self.stats.prompt_tokens

    def ask(
        self, question: str, *, options: GenerationOptions | None = None, **changes: Any
    ) -> Generator[str, None, None]:
        """Yield the answer in pieces of whole characters. changes are fields of `GenerationOptions`.

        If the caller stops reading, history holds the pieces read so far. Raises InputError if the chat with this
        question exceeds the model's context.
        """
        captioner = self.captioner
        defaults = {"max_new_tokens": CHAT_MAX_NEW_TOKENS, **captioner.defaults}
        options = generation_options(options, changes, defaults)
        if options.start_with:
            raise InputError("start_with is for captions; ask a chat without it")
        if not self.shown:
            warnings.warn(NO_IMAGE, stacklevel=2)
        for image, tiles in self._tiles:
            image.tiles = tiles
        chat = dialogue([*chain(*self.history), question], self.shown)
        request = captioner.chat_request(chat, options, remedy="shorten it, or reset the chat")
        outputs = captioner.generate([request], stats := Stats(), self.batch)
        answer = ""
        eos = captioner.tokenizer.eos_token_id
        try:
            for piece in captioner.tokenizer.stream(o.token_id for o in outputs if o.token_id != eos):
                answer += piece
                yield piece
        finally:
            outputs.close()
            if request.output:  # the question has been read
                self.history.append((question, answer))
                self.stats = stats

    def reset(self) -> None:
        """Forget all questions and answers; the images stay."""
        self.history.clear()
