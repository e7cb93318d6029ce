"""From messages to what the model reads, and from its tokens to text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.inference.continuous_batching import TokenOutput
from nanovlm import PROMPT
from nanovlm.image_processing import load_image
from nanovlm.processor import Processor
from nanovlm.serving.protocol import Message, Problem
from nanovlm.tokenizer import StreamingDecoder, Tokenizer


@dataclass(frozen=True)
class Asked:
    """A chat up to the question that is to be answered; history holds the questions and answers before it."""

    urls: list[str]  # of all pictures, which come before all words, as nanoVLM was trained
    history: list[tuple[str, str]]
    question: str


def understand(messages: Sequence[Message]) -> Asked:
    """Lay messages out as nanoVLM's chats are, where a user and an assistant take turns.

    There is no system role: what it says comes before the first question. Messages of the same role in a row are one,
    and a picture without words is to be described.
    """
    system, turns = [], []  # texts; roles and texts
    for message in messages:
        if message.role != "user" and message.urls:
            raise Problem(400, f"only user messages can show pictures, not {message.role} ones", param="messages")
        if message.role in ("system", "developer"):
            system.append(message.text)
        elif turns and turns[-1][0] == message.role:
            turns[-1][1] = "\n".join(filter(None, (turns[-1][1], message.text)))
        else:
            turns.append([message.role, message.text])
    if not turns or turns[0][0] != "user" or turns[-1][0] != "user":
        raise Problem(400, "a chat begins with a user message and ends with the one to answer", param="messages")
    urls = [url for message in messages for url in message.urls]
    words = [text for _, text in turns]
    if not words[-1].strip():
        if not urls:
            raise Problem(400, "the last user message is empty; ask something", param="messages")
        words[-1] = PROMPT
    words[0] = "\n\n".join([*filter(None, system), words[0]])
    return Asked(urls, list(zip(words[:-1:2], words[1::2])), words[-1])


def prepare(
    asked: Asked, processor: Processor, fetch: Callable[[str], bytes], max_pixels: int
) -> tuple[Tensor, Tensor | None]:
    """What the model is to read: ids (T,) and images (N, 3, S, S), or a Problem. A thread may do it."""
    cfg, images, grids, places = processor.cfg, [], [], 0
    for number, url in enumerate(asked.urls, 1):
        try:
            tiles, grid = processor.preprocess(load_image(fetch(url), max_pixels=max_pixels))
        except ValueError as error:
            message = str(error).removeprefix("picture: ")
            raise Problem(400, f"picture {number}: {message}", code="invalid_image", param="messages") from None
        places += len(tiles) * cfg.mp_image_token_length
        if places > cfg.lm_max_position_embeddings:  # else many small pictures would fill the memory
            raise Problem(
                400,
                f"{number} pictures alone take {places} tokens, more than lm_max_position_embeddings="
                f"{cfg.lm_max_position_embeddings}; show fewer",
                code="context_length_exceeded",
                param="messages",
            )
        images.append(tiles)
        grids.append(grid)
    try:
        ids = processor.encode_prompt(grids, asked.question, asked.history)
    except ValueError as error:  # no chat template; no Unicode
        raise Problem(400, str(error), param="messages") from None
    return torch.tensor(ids), torch.cat(images) if images else None


class ResponseStream:
    """One answer as it is said: text in whole characters, up to the first of the stop strings."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.spelling, self.stops = StreamingDecoder(tokenizer), [stop for stop in stops if stop]
        self.end = tokenizer.eos_token_id
        self.held = ""  # might be the beginning of a stop string
        self.tokens = 0
        self.finished: str | None = None

    def hear(self, said: TokenOutput) -> str:
        """The text that can be said now; `finished` tells whether it is the last."""
        self.tokens += 1
        self.held += self.spelling.add(said.token_id) if said.token_id != self.end else ""
        if said.finished:
            self.held += self.spelling.rest()
        found = [(self.held.find(stop) + len(stop), -len(stop)) for stop in self.stops if stop in self.held]
        if found:  # the one that is complete first; of two such, the longer
            end, minus_length = min(found)
            self.finished = "stop"
            return self._say(end + minus_length)
        if said.finished:
            self.finished = said.finished
            return self._say(len(self.held))
        return self._say(len(self.held) - max(map(self._begun, self.stops), default=0))

    def _begun(self, stop: str) -> int:
        """How many characters of a stop string stand at the end of what is held."""
        lengths = range(min(len(stop), len(self.held)), 0, -1)
        return next((n for n in lengths if self.held.endswith(stop[:n])), 0)

    def _say(self, n: int) -> str:
        text, self.held = self.held[:n], self.held[n:]
        return text
