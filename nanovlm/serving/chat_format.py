"""From a request's messages to what the model reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovlm import PROMPT
from nanovlm.errors import ImageError, NanoVLMError
from nanovlm.image_processing import load_image
from nanovlm.processor import Processor
from nanovlm.serving.errors import APIError
from nanovlm.serving.image_urls import decode_data_url
from nanovlm.serving.protocol import Message


@dataclass(frozen=True)
class Chat:
    """A conversation up to the question to answer; history holds the questions and answers before it."""

    image_urls: list[str]  # all images come before all text, as in nanoVLM's training data
    history: list[tuple[str, str]]
    question: str


@dataclass(frozen=True)
class ModelInputs:
    input_ids: Tensor  # (T,)
    images: Tensor | None  # (N, 3, S, S)


def parse_messages(messages: Sequence[Message]) -> Chat:
    """Lay messages out as nanoVLM's chats, in which user and assistant take turns.

    There is no system role: system text is put before the first question. Consecutive messages of one role are joined,
    and an image without text gets the default prompt.
    """
    system: list[str] = []
    turns: list[tuple[str, str]] = []  # role and text
    for message in messages:
        if message.role != "user" and message.image_urls:
            raise APIError(400, f"only user messages may contain images, not {message.role} ones", param="messages")
        if message.role in ("system", "developer"):
            system.append(message.text)
        elif turns and turns[-1][0] == message.role:
            turns[-1] = (message.role, "\n".join(filter(None, (turns[-1][1], message.text))))
        else:
            turns.append((message.role, message.text))
    if not turns or turns[0][0] != "user" or turns[-1][0] != "user":
        raise APIError(400, "a chat begins with a user message and ends with the one to answer", param="messages")
    image_urls = [url for message in messages for url in message.image_urls]
    texts = [text for _, text in turns]
    if not texts[-1].strip():
        if not image_urls:
            raise APIError(400, "the last user message is empty; ask something", param="messages")
        texts[-1] = PROMPT
    texts[0] = "\n\n".join([*filter(None, system), texts[0]])
    return Chat(image_urls, list(zip(texts[:-1:2], texts[1::2])), texts[-1])


def prepare_inputs(chat: Chat, files: Sequence[str | bytes], processor: Processor, max_pixels: int) -> ModelInputs:
    """Preprocess a chat and its images, each a file or a data URL. Threads may do it."""
    tiles: list[Tensor] = []
    grids: list[tuple[int, int]] = []
    for number, file in enumerate(files, 1):
        image_tiles, grid = preprocess(number, file, processor, max_pixels)
        tiles.append(image_tiles)
        grids.append(grid)
        check_image_tokens(tiles, processor)
    try:
        ids = processor.encode_prompt(grids, chat.question, chat.history)
    except NanoVLMError as error:  # the model has no chat template, or the template refuses this chat
        raise APIError(400, str(error), param="messages") from None
    return ModelInputs(torch.tensor(ids), torch.cat(tiles) if tiles else None)


def preprocess(number: int, file: str | bytes, processor: Processor, max_pixels: int) -> tuple[Tensor, tuple[int, int]]:
    """The tiles (n, 3, S, S) of the request's image of that number, counted from 1, and their grid."""
    name = f"image {number}"
    try:
        data = decode_data_url(file) if isinstance(file, str) else file
    except ImageError as error:
        raise invalid_image(f"{name}: {error}") from None
    try:
        return processor.preprocess(load_image(data, name, max_pixels))
    except ImageError as error:  # begins with the name
        raise invalid_image(str(error)) from None


def invalid_image(message: str) -> APIError:
    return APIError(400, message, "invalid_image", "messages")


def check_image_tokens(tiles: Sequence[Tensor], processor: Processor) -> None:
    """Refuse more images than the context holds, before they fill the memory."""
    cfg = processor.cfg
    n_tokens = sum(map(len, tiles)) * cfg.mp_image_token_length
    if n_tokens > cfg.lm_max_position_embeddings:
        limit = f"lm_max_position_embeddings={cfg.lm_max_position_embeddings}"
        message = f"{len(tiles)} images alone take {n_tokens} tokens, more than {limit}; show fewer"
        raise APIError(400, message, "context_length_exceeded", "messages")
