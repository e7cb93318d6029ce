"""A conversation is a list of turns, which `Processor.encode` turns into token ids.

Captions, chats, requests, rows of data and questions of an evaluation all take this form.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, takewhile
from typing import Any

from nanovlm.errors import InputError


@dataclass(frozen=True)
class Turn:
    """One side's texts and images; role is system, user or assistant.

    parts are texts and images in reading order. An image is anything but a str, such as its URL, a `TiledImage`, or
    None where an image will stand. learned is True for an answer that is trained on.
    """

    role: str
    parts: Sequence[Any]
    learned: bool = field(default=True, compare=False)

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))


Chat = Sequence[Turn]


def dialogue(texts: Iterable[str], shown: Iterable[Any] = ()) -> list[Turn]:
    """A conversation of texts that user and assistant say by turns; the user first shows images."""
    turns: list[Turn] = []
    for role, text in zip(cycle(("user", "assistant")), texts):
        if not isinstance(text, str):
            raise InputError(f"a prompt is one string, not {type(text).__name__}; ask several one by one")
        turns.append(Turn(role, (text,) if turns else (*shown, text)))
    return turns


def images_of(chat: Chat) -> list[Any]:
    """All images in reading order."""
    return [part for turn in chat for part in turn.parts if not isinstance(part, str)]


def with_images(chat: Chat, images: Sequence[Any]) -> list[Turn]:
    """The conversation with other images in the places of its own."""
    if len(images) != (n := len(images_of(chat))):
        raise InputError(f"{len(images)} images for a conversation that has places for {n}")
    rest = iter(images)
    placed = [[part if isinstance(part, str) else next(rest) for part in turn.parts] for turn in chat]
    return [Turn(turn.role, parts, turn.learned) for turn, parts in zip(chat, placed)]


def images_first(chat: Chat) -> list[Turn]:
    """The conversation with all images at the beginning of the user's first turn."""
    first = next(turn for turn in chat if turn.role == "user")
    texts = [[part for part in turn.parts if isinstance(part, str)] for turn in chat]
    moved = [[*images_of(chat), *parts] if turn is first else parts for turn, parts in zip(chat, texts)]
    return [Turn(turn.role, parts, turn.learned) for turn, parts in zip(chat, moved)]


def is_asked(chat: Chat) -> bool:
    """True if the user has said anything since the last answer."""
    asked = takewhile(lambda turn: turn.role != "assistant", reversed(chat))
    return any(turn.text.strip() for turn in asked if turn.role == "user")


def check_chat(chat: Chat) -> None:
    """InputError unless a conversation ends with a question, and only the user shows images."""
    if images_of([turn for turn in chat if turn.role != "user"]):
        raise InputError("only messages of the user may contain images")
    if [turn.role for turn in chat if turn.role != "system"][-1:] != ["user"]:
        raise InputError("the last message must be the user's; end with a question")
    if not is_asked(chat) and not images_of(chat):
        raise InputError("the last user message is empty; ask something")
