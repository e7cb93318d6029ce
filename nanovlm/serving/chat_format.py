"""From a request's messages to what the model reads."""

import base64
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from models.inference.serving_caches import ImageCache, TiledImage
from nanovlm.embedded import PROMPT
from nanovlm.errors import ImageError
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.image_urls import decode_data_url
from nanovlm.processing.processor import Processor
from nanovlm.serving.errors import APIError, refusing
from nanovlm.serving.protocol import ContentPart, ImagePart, MediaURL, Message, TextPart


@dataclass(frozen=True)
class Chat:
    """A conversation up to the question to answer; history holds the questions and answers before it."""

    image_urls: list[MediaURL]
    history: list[tuple[str, str]]
    question: str
    answer: str = ""  # the beginning of the answer, which the model continues
    turns: list[tuple[str, list[str | None]]] | None = None  # roles, texts and images (None) in the client's order


@dataclass(frozen=True)
class ModelInputs:
    input_ids: Tensor  # (T,)
    images: list[TiledImage]
    continued_ids: list[int]  # the last ones of input_ids that belong to the answer's text


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
    an image without text gets the default prompt, and a greeting by the assistant follows an empty question. If the
    assistant has the last word, the model continues its message, as llama.cpp's server does. With images_in_turns
    messages stay as they are, as in transformers and vLLM.
    """
    for message in messages:
        if message.role != "user" and message.image_urls:
            raise APIError(400, f"only user messages may contain images, not {message.role} ones", param="messages")
    system = [message.text for message in messages if message.role in ("system", "developer")]
    dialogue = [message for message in messages if message.role in ("user", "assistant")]
    turns = [_Turn.join(role, group) for role, group in groupby(dialogue, lambda message: message.role)]
    if not turns:
        raise APIError(400, "messages holds no message of a user; ask something", param="messages")
    if turns[0].role == "assistant":
        turns.insert(0, _Turn("user", ""))
    answer = turns.pop().text if turns[-1].role == "assistant" else ""
    is_asked = bool(turns[-1].text.strip() or answer)
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
        as_sent, answer = _unchanged_turns(messages, is_asked)
        return Chat(image_urls, [], "", answer, as_sent)
    texts[0] = "\n\n".join(filter(None, [*system, texts[0]]))
    return Chat(image_urls, list(zip(texts[:-1:2], texts[1::2])), texts[-1], answer)


def _unchanged_turns(messages: Sequence[Message], is_asked: bool) -> tuple[list[tuple[str, list[str | None]]], str]:
    """The turns of messages, and the beginning of an answer that the model continues."""
    turns: list[tuple[str, list[str | None]]] = []
    for message in messages:
        parts: list[str | None] = []
        for is_text, group in groupby(message.content, lambda part: isinstance(part, TextPart)):
            texts = [part.text if isinstance(part, TextPart) else None for part in group]
            parts += ["".join(filter(None, texts))] if is_text else texts  # joined, they could spell a special token
        turns.append(("system" if message.role == "developer" else message.role, parts or [""]))
    if not is_asked:
        next(parts for role, parts in reversed(turns) if role == "user").append(PROMPT)
    answer = "".join(filter(None, turns.pop()[1])) if turns[-1][0] == "assistant" else ""
    return turns, answer


def prepare_inputs(chat: Chat, images: list[TiledImage], processor: Processor) -> ModelInputs:
    """The tokens of a chat about preprocessed images. Threads may do it."""
    grids = [image.grid for image in images if image.grid is not None]
    tokenizer = processor.tokenizer
    with refusing("messages"):  # the model has no chat template, or the template refuses this chat
        if chat.turns is None:
            ids = processor.encode_prompt(grids, chat.question, chat.history)
        else:
            ids = processor.encode_turns(grids, chat.turns)
        continued_ids = tokenizer.encode(tokenizer.answer_prefix + chat.answer) if chat.answer else []
    return ModelInputs(torch.tensor(ids + continued_ids), images, continued_ids)


def decode_file(name: str, file: str | bytes) -> bytes:
    """The bytes of a file or of a data URL; ImageError begins with its name."""
    try:
        return decode_data_url(file) if isinstance(file, str) else file
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None


def preprocess(
    name: str,
    file: str | bytes,
    processor: Processor,
    max_pixels: int,
    image_cache: ImageCache | None = None,
    encoder: str = "",
    detail: str = "auto",
) -> TiledImage:
    """An image of a request, a file or a data URL; ImageError begins with its name. Threads may do it.

    An image that the cache holds of this encoder is neither decoded nor encoded again.
    """
    data = decode_file(name, file)
    key = encoder, detail == "low", hashlib.blake2b(data, digest_size=16).digest()
    if image_cache is not None and (cached := image_cache.find(key)):
        return cached
    tiles, grid = processor.preprocess(load_image(data, name, max_pixels), 1 if detail == "low" else None)
    return TiledImage(tiles, key, grid)


def video_parts(name: str, file: str | bytes, with_times: bool, max_pixels: int) -> list[ContentPart]:
    """A video of a request as images of one tile and, with_times, SmolVLM2's text around them. Threads may do it.

    Another process decodes it, whatever its format, within limits. ImageError, which begins with its name, also if all
    frames shown have more than max_pixels.
    """
    from nanovlm.processing.video import MAX_FRAMES, Video

    with TemporaryDirectory() as folder:
        path = Path(folder, "video.mp4")
        path.write_bytes(decode_file(name, file))
        try:
            video = Video.read(path, MAX_FRAMES)
        except ImageError as error:
            raise ImageError(str(error).replace(str(path), name)) from None
    if (n := sum(frame.width * frame.height for frame in video.frames)) > max_pixels:
        raise ImageError(f"{name}: {len(video.frames)} frames of {n:,} pixels, more than {max_pixels:,}; scale it down")
    *labels, end = video.texts()
    parts: list[ContentPart] = []
    for label, frame in zip(labels, video.frames):
        frame.save(buffer := io.BytesIO(), "BMP")  # written and read faster than PNG
        url = f"data:image/bmp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        parts += [TextPart(type="text", text=label)] if with_times else []
        parts.append(ImagePart(type="image_url", image_url=MediaURL(url=url, detail="low")))
    return [*parts, TextPart(type="text", text=end)] if with_times else parts


def check_image_tokens(images: Sequence[TiledImage], processor: Processor) -> None:
    """Refuse more images than the context holds, before they fill the memory."""
    cfg = processor.cfg
    n_tokens = sum(image.n_tiles for image in images) * cfg.mp_image_token_length
    if n_tokens > cfg.lm_max_position_embeddings:
        limit = f"lm_max_position_embeddings={cfg.lm_max_position_embeddings}"
        message = f"{len(images)} images alone take {n_tokens} tokens, more than {limit}; show fewer"
        raise APIError(400, message, "context_length_exceeded", "messages")
