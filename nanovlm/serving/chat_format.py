"""From a request's messages to what the model reads."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from models.inference.caches import ImageCache, TiledImage
from nanovlm.embedded import PROMPT
from nanovlm.errors import ImageError
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.image_urls import decode_data_url
from nanovlm.processing.processor import Processor
from nanovlm.serving.errors import APIError, refusing
from nanovlm.serving.protocol import MediaURL, Message, TextPart


@dataclass(frozen=True)
class Chat:
    """A conversation up to the question to answer; history holds the questions and answers before it."""

    image_urls: list[MediaURL]
    history: list[tuple[str, str]]
    question: str
    turns: list[tuple[str, list[str | None]]] | None = None  # roles, texts and images (None) in the client's order


@dataclass(frozen=True)
class ModelInputs:
    input_ids: list[int]
    images: list[TiledImage]


@dataclass
class _Turn:
    """Consecutive messages of one role."""

    role: str
    text: str
    has_images: bool = False

    @classmethod
    def join(cls, role: str, messages: Iterable[Message]) -> "_Turn":
        joined = list(messages)
        return cls(role, "\n".join(filter(None, (one.text for one in joined))), any(one.image_urls for one in joined))


def parse_messages(messages: Sequence[Message], images_in_turns: bool = False) -> Chat:
    """Lay messages out as nanoVLM's chats, in which user and assistant take turns.

    There is no system role: system text is put before the first question. Consecutive messages of one role are joined,
    an image without text gets the default prompt, and a greeting by the assistant follows an empty question. The last
    word must be a user's. With images_in_turns messages stay as they are, as in transformers and vLLM.
    """
    for message in messages:
        if message.role != "user" and message.image_urls:
            raise APIError(400, f"only user messages may contain images, not {message.role} ones", param="messages")
    system = [message.text for message in messages if message.role in ("system", "developer")]
    dialogue = [message for message in messages if message.role in ("user", "assistant")]
    turns = [_Turn.join(role, group) for role, group in groupby(dialogue, lambda message: message.role)]
    if not turns:
        raise APIError(400, "messages holds no message of a user; ask something", param="messages")
    if turns[-1].role == "assistant":
        raise APIError(400, "the last message is the assistant's; end with a question of a user", param="messages")
    if turns[0].role == "assistant":
        turns.insert(0, _Turn("user", ""))
    is_asked = bool(turns[-1].text.strip())
    for turn in turns:
        if turn.has_images and not turn.text.strip():
            turn.text = PROMPT
    texts = [turn.text for turn in turns]
    if not is_asked:
        if not any(turn.has_images for turn in turns):
            raise APIError(400, "the last user message is empty; ask something", param="messages")
        texts[-1] = PROMPT
    image_urls = [url for message in messages for url in message.image_urls]
    if images_in_turns:
        return Chat(image_urls, [], "", _unchanged_turns(messages, is_asked))
    texts[0] = "\n\n".join(filter(None, [*system, texts[0]]))
    return Chat(image_urls, list(zip(texts[:-1:2], texts[1::2])), texts[-1])


def _unchanged_turns(messages: Sequence[Message], is_asked: bool) -> list[tuple[str, list[str | None]]]:
    """The turns of messages; without a question the last user's has the default prompt."""
    turns: list[tuple[str, list[str | None]]] = []
    for message in messages:
        parts: list[str | None] = []
        for is_text, group in groupby(message.content, lambda part: isinstance(part, TextPart)):
            texts = [part.text if isinstance(part, TextPart) else None for part in group]
            parts += ["".join(filter(None, texts))] if is_text else texts  # joined, they could spell a special token
        turns.append(("system" if message.role == "developer" else message.role, parts or [""]))
    if not is_asked:
        next(parts for role, parts in reversed(turns) if role == "user").append(PROMPT)
    return turns


def prepare_inputs(chat: Chat, images: list[TiledImage], processor: Processor) -> ModelInputs:
    """The tokens of a chat about preprocessed images. Threads may do it."""
    grids = [image.grid for image in images if image.grid is not None]
    with refusing("messages"):  # the model has no chat template, or the template refuses this chat
        if chat.turns is None:
            ids = processor.encode_prompt(grids, chat.question, chat.history)
        else:
            ids = processor.encode_turns(grids, chat.turns)
    return ModelInputs(ids, images)


def preprocess(
    name: str,
    file: str | bytes,
    processor: Processor,
    max_pixels: int,
    image_cache: ImageCache | None = None,
    detail: str = "auto",
) -> TiledImage:
    """An image of a request, a file or a data URL; ImageError begins with its name. Threads may do it.

    An image that the cache holds is neither decoded nor encoded again.
    """
    try:
        data = decode_data_url(file) if isinstance(file, str) else file
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    key = detail == "low", hashlib.blake2b(data, digest_size=16).digest()
    if image_cache is not None and (cached := image_cache.get(key)):
        return cached
    tiles, grid = processor.preprocess(load_image(data, name, max_pixels), 1 if detail == "low" else None)
    return TiledImage(tiles, key, grid)


def check_image_tokens(images: Sequence[TiledImage], processor: Processor) -> None:
    """Refuse more images than the context holds, before they fill the memory."""
    cfg = processor.cfg
    n_tokens = sum(image.n_tiles for image in images) * cfg.mp_image_token_length
    if n_tokens > cfg.lm_max_position_embeddings:
        limit = f"lm_max_position_embeddings={cfg.lm_max_position_embeddings}"
        message = f"{len(images)} images alone take {n_tokens} tokens, more than {limit}; show fewer"
        raise APIError(400, message, "context_length_exceeded", "messages")
