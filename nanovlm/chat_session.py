"""Conversation: questions about the same pictures, one after another, each read as what follows those before it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.decoding import GREEDY, SamplingParams, generate_tokens, token_presence_mask
from models.vision_language_model import PrefillState
from nanovlm.captioner import Captioner, Picture
from nanovlm.image_processing import load_image


class ChatSession:
    """A chat about pictures, or none; history holds the questions and answers so far.

    A question is laid out with all that was said before, as for somebody who reads the chat anew, and what the cache
    remembers of that is not read again: never the pictures, which come first, and most often nothing but the question.
    Now and then an answer's tokens are not those that its text would be encoded as, and are read once more.
    """

    def __init__(self, captioner: Captioner, pictures: Sequence[Picture] = ()):
        self.captioner, self.model = captioner, captioner.model
        tiles = [captioner.processor.images(load_image(picture)) for picture in pictures]
        self.grids = [grid for _, grid in tiles]
        self.images = torch.cat([images for images, _ in tiles]) if tiles else None
        self.history: list[tuple[str, str]] = []
        self.ids: list[int] = []  # of what the cache remembers; an interruption may leave one token more there
        self.prefix: PrefillState | None = None
        self.tokens_read = 0  # of the last question, with what had to be read beside it

    def ask(self, question: str, *, max_new_tokens: int = 128, sampling: SamplingParams = GREEDY) -> Iterator[str]:
        """The answer in pieces of whole characters. Who stops listening has heard all that history will tell."""
        ids = self.captioner.processor.prompt(self.grids, question, self.history)
        limit = self.model.cfg.lm_max_position_embeddings
        if len(ids) > limit:
            raise ValueError(
                f"{len(ids)} tokens with this question exceed lm_max_position_embeddings={limit}; shorten it, or reset "
                "the chat"
            )
        logits, answer = self._read(ids), ""
        try:
            room = min(max_new_tokens, limit - len(ids) + 1)
            for piece in self.captioner.tokenizer.stream(self._choose(ids, logits, room, sampling)):
                answer += piece
                yield piece
        finally:
            self.history.append((question, answer))

    def reset(self) -> None:
        """Forget what was said, not what was seen."""
        self.history.clear()

    @torch.inference_mode()
    def _read(self, ids: list[int]) -> Tensor:
        """The logits (1, vocabulary) after ids, of which the cache may know the beginning."""
        known = 0
        while known < min(len(self.ids), len(ids) - 1) and self.ids[known] == ids[known]:
            known += 1
        images = None
        if self.images is not None and self.model.image_token_id in ids[known:]:  # they are read whole or not at all
            known, images = 0, self.images.to(self.model.device)
        prefix = self.prefix.first(known) if known else None
        new = torch.tensor([ids[known:]], device=self.model.device)
        logits, self.prefix = self.model.prefill(new, images, prefix=prefix)
        self.ids, self.tokens_read = list(ids), new.size(1)
        return logits

    @torch.inference_mode()
    def _choose(self, ids: list[int], logits: Tensor, max_new_tokens: int, sampling: SamplingParams) -> Iterator[int]:
        """The answer's ids, each remembered once the next is asked for."""
        end, seen = self.captioner.tokenizer.eos_token_id, None
        if sampling.repetition_penalty != 1:
            read = torch.tensor([ids], device=logits.device)
            seen = token_presence_mask(read, logits.size(-1), read != self.model.image_token_id)

        def step(chosen: Tensor) -> Tensor:
            logits, self.prefix = self.model.decode(chosen, self.prefix)
            self.ids.append(int(chosen))
            return logits

        options = {"sampling": sampling, "max_new_tokens": max_new_tokens, "eos_token_id": end, "seen": seen}
        for chosen in generate_tokens(logits, step, **options):
            if int(chosen) == end:
                return
            yield int(chosen)
