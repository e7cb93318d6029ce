"""From a request's messages and images to what the model reads."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from models.inference.caches import ImageCache, TiledImage
from nanovlm.embedded import PROMPT
from nanovlm.errors import ImageError, InputError, PromptTooLongError
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.processor import Processor
from nanovlm.serving.openai_api import ImageURL, Message

MAX_PIXELS = 64_000_000  # of an image: the largest that phones save
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64}")  # fewer characters hold no image


@dataclass(frozen=True)
class Chat:
    """A conversation up to the question to answer: images, and turns of roles and parts, None for an image.

    Without images in turns, user and assistant alternate, one text each.
    """

    images: list[ImageURL]
    turns: list[tuple[str, list[str | None]]]


def read_chat(messages: Sequence[Message], images_in_turns: bool = False, default_prompt: str = PROMPT) -> Chat:
    """Lay messages out as nanoVLM's chats, in which user and assistant take turns.

    There is no system role: system text is put before the first question. Consecutive messages of one role are joined,
    a question without text gets the default prompt if there are images, and a greeting by the assistant follows an
    empty question. With images_in_turns messages stay as they are, as in transformers and vLLM.
    """
    images = [image for message in messages for image in message.images]
    dialogue = [message for message in messages if message.role != "system"]
    if any(message.images and message.role != "user" for message in messages):
        raise InputError("only messages of the user may contain images")
    if not dialogue or dialogue[-1].role != "user":
        raise InputError("the last message must be the user's; end with a question")
    turns: list[tuple[str, str]] = []
    for role, group in groupby(dialogue, lambda message: message.role):
        turns.append((role, "\n".join(filter(None, (message.text for message in group)))))
    is_asked = bool(turns[-1][1].strip())
    if not is_asked and not images:
        raise InputError("the last user message is empty; ask something")
    if images_in_turns:
        unchanged = [(str(message.role), message.parts) for message in messages]
        if not is_asked:
            next(parts for role, parts in reversed(unchanged) if role == "user").append(default_prompt)
        return Chat(images, unchanged)
    default = default_prompt if images else ""
    texts = [default if role == "user" and not text.strip() else text for role, text in turns]
    if turns[0][0] == "assistant":
        texts.insert(0, "")
    system = [message.text for message in messages if message.role == "system"]
    texts[0] = "\n\n".join(filter(None, [*system, texts[0]]))
    return Chat(images, [("assistant" if i % 2 else "user", [text]) for i, text in enumerate(texts)])


def prepare_images(
    files: Sequence[bytes | str], details: Sequence[str], processor: Processor, cache: ImageCache | None
) -> list[TiledImage]:
    """Tiles of images, files or data URLs; an image that the cache holds is neither decoded nor encoded again.

    More images than the context holds are refused before they fill the memory.
    """
    images: list[TiledImage] = []
    n_tokens = 0
    for number, (file, detail) in enumerate(zip(files, details), 1):
        name = f"image {number}"
        is_low = detail == "low"
        data = file if isinstance(file, bytes) else decode_data_url(file, name)
        key = is_low, hashlib.blake2b(data, digest_size=16).digest()
        image = None if cache is None else cache.get(key)
        if image is None:
            tiles, grid = processor.preprocess(load_image(data, name, MAX_PIXELS), 1 if is_low else None)
            image = TiledImage(tiles, key, grid)
        images.append(image)
        n_tokens += image.n_tiles * processor.cfg.mp_image_token_length
        check_length(n_tokens, processor, f"{len(files)} images, of which the first {number} take {n_tokens} tokens")
    return images


def encode_chat(chat: Chat, images: Sequence[TiledImage], processor: Processor) -> list[int]:
    """Ids of a chat about preprocessed images."""
    grids = [image.grid for image in images if image.grid is not None]
    if processor.layout.images_in_turns:
        ids = processor.encode_turns(grids, chat.turns)
    else:
        texts = ["".join(filter(None, parts)) for _, parts in chat.turns]
        ids = processor.encode_prompt(grids, texts[-1], list(zip(texts[:-1:2], texts[1::2])))
    check_length(len(ids), processor, f"{len(ids)} tokens")
    return ids


def check_length(n_tokens: int, processor: Processor, what: str) -> None:
    """Refuse a prompt beyond the context."""
    limit = processor.cfg.lm_max_position_embeddings
    if n_tokens > limit:
        message = f"prompt is too long: {what}, more than the model's context (lm_max_position_embeddings={limit})"
        raise PromptTooLongError(f"{message}; shorten it")


def is_data_url(url: str) -> bool:
    """Check whether a URL holds the image itself: as a data URL, or as base64 alone, which some clients send."""
    return url[:5].lower() == "data:" or BASE64.match(url) is not None


def decode_data_url(url: str, name: str) -> bytes:
    """Bytes of data:image/png;base64,... or of base64 alone; their content tells the image format."""
    head, comma, data = url.partition(",") if url[:5].lower() == "data:" else (";base64", ",", url)
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(f"{name}: a data URL without base64; send data:image/png;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise ImageError(f"{name}: a data URL with invalid base64: {error}") from None
