"""From a request's messages and images to what the model reads."""

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from models.inference.caches import ImageCache, TiledImage
from nanovlm.embedded import PROMPT
from nanovlm.errors import ImageError
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.processor import Processor
from nanovlm.serving.openai_api import APIError, ImageURL, Message

MAX_PIXELS = 64_000_000  # of an image: the largest that phones save
MIN_BASE64 = 64  # characters; what is shorter holds no image
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")


@dataclass(frozen=True)
class Chat:
    """A conversation up to the question to answer: images, and turns of roles and parts, None for an image.

    Without the parts' images, turns are those of user and assistant by turns, one text each.
    """

    images: list[ImageURL]
    turns: list[tuple[str, list[str | None]]]


def read_chat(messages: Sequence[Message], images_in_turns: bool = False) -> Chat:
    """Lay messages out as nanoVLM's chats, in which user and assistant take turns.

    There is no system role: system text is put before the first question. Consecutive messages of one role are joined,
    an image without text gets the default prompt, and a greeting by the assistant follows an empty question. The last
    word must be a user's. With images_in_turns messages stay as they are, as in transformers and vLLM.
    """
    images = [image for message in messages for image in message.images]
    dialogue = [message for message in messages if message.role in ("user", "assistant")]
    for message in messages:
        if message.role != "user" and message.images:
            raise refusal(f"only user messages may contain images, not {message.role} ones")
    if not any(message.role == "user" for message in dialogue):
        raise refusal("messages holds no message of a user; ask something")
    if dialogue[-1].role == "assistant":
        raise refusal("the last message is the assistant's; end with a question of a user")
    turns: list[tuple[str, str]] = [] if dialogue[0].role == "user" else [("user", "")]
    for role, group in groupby(dialogue, lambda message: message.role):
        joined = list(group)
        text = "\n".join(filter(None, (message.text for message in joined)))
        is_shown = any(message.images for message in joined)
        turns.append((role, PROMPT if is_shown and not text.strip() else text))
    is_asked = any(message.text.strip() for message in joined)
    if not is_asked and not images:
        raise refusal("the last user message is empty; ask something")
    if images_in_turns:
        return Chat(images, unchanged_turns(messages, is_asked))
    texts = [text for _, text in turns]
    texts[-1] = texts[-1] if is_asked else PROMPT
    system = [message.text for message in messages if message.role in ("system", "developer")]
    texts[0] = "\n\n".join(filter(None, [*system, texts[0]]))
    return Chat(images, [(role, [text]) for (role, _), text in zip(turns, texts)])


def unchanged_turns(messages: Sequence[Message], is_asked: bool) -> list[tuple[str, list[str | None]]]:
    """Turns of messages as they are; without a question the last user's has the default prompt."""
    turns: list[tuple[str, list[str | None]]] = []
    for message in messages:
        parts: list[str | None] = []
        for is_text, group in groupby(message.content, lambda part: part.text is not None):
            texts = [part.text for part in group]
            parts += ["".join(filter(None, texts))] if is_text else texts  # joined, they could spell a special token
        turns.append(("system" if message.role == "developer" else message.role, parts or [""]))
    if not is_asked:
        next(parts for role, parts in reversed(turns) if role == "user").append(PROMPT)
    return turns


def prepare_images(
    files: Sequence[bytes | str], details: Sequence[str], processor: Processor, cache: ImageCache | None
) -> list[TiledImage]:
    """Tiles of images, files or data URLs; an image that the cache holds is neither decoded nor encoded again.

    More images than the context holds are refused before they fill the memory.
    """
    images: list[TiledImage] = []
    for number, (file, detail) in enumerate(zip(files, details), 1):
        try:
            images.append(prepare_image(file, f"image {number}", detail == "low", processor, cache))
        except ImageError as error:
            raise APIError(400, str(error), "invalid_image", "messages") from None
        n_tokens = sum(image.n_tiles for image in images) * processor.cfg.mp_image_token_length
        check_length(n_tokens, processor, f"{len(files)} images, of which the first {number} take {n_tokens} tokens")
    return images


def prepare_image(
    file: bytes | str, name: str, is_low: bool, processor: Processor, cache: ImageCache | None
) -> TiledImage:
    """One image, whose errors begin with its name."""
    data = file if isinstance(file, bytes) else decode_data_url(file, name)
    key = is_low, hashlib.blake2b(data, digest_size=16).digest()
    if cache is not None and (cached := cache.get(key)):
        return cached
    tiles, grid = processor.preprocess(load_image(data, name, MAX_PIXELS), 1 if is_low else None)
    return TiledImage(tiles, key, grid)


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
    """Refuse a prompt beyond the context in words and by a code that clients look for."""
    limit = processor.cfg.lm_max_position_embeddings
    if n_tokens > limit:
        message = f"prompt is too long: {what}, more than the model's context (lm_max_position_embeddings={limit})"
        raise APIError(400, f"{message}; shorten it", "context_length_exceeded", "messages")


def is_data_url(url: str) -> bool:
    """Whether a URL holds the image itself: as a data URL, or as base64 alone, which some clients send."""
    is_base64 = len(url) >= MIN_BASE64 and BASE64.fullmatch(url[:MIN_BASE64]) is not None
    return url[:5].lower() == "data:" or is_base64


def decode_data_url(url: str, name: str) -> bytes:
    """Bytes of data:image/png;base64,... or of base64 alone; their content tells the image format."""
    head, comma, data = url.partition(",") if url[:5].lower() == "data:" else ("data:;base64", ",", url)
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(f"{name}: a data URL without base64; send data:image/png;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{name}: a data URL with invalid base64: {error}") from None


def refusal(message: str) -> APIError:
    return APIError(400, message, param="messages")
