"""One record, a JSON object or a dataset's row, as an example: the_cauldron's turns, chats, or plain columns."""

import base64
import binascii
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nanovlm.data.examples import Example, ExampleError
from nanovlm.errors import DataError
from nanovlm.options import ReadOptions

Pairs = list[tuple[str, str]]  # (prompt, answer)
IMAGE_COLUMNS = ("images", "image")
PLACEHOLDER = re.compile("<image>")  # marks an image's position in the text of LLaVA and its followers
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "caption", "answer", "captions")
PROMPT_COLUMNS = ("question", "prompt")
PREFERENCES = ("chosen", "rejected", "rejected_response")  # the columns of trl and ms-swift
COLUMN_OPTIONS = ("prompt", "text_column", "prompt_column")  # the options that apply to records of plain columns


def applicable_options(columns: Collection[str], name: str, options: ReadOptions) -> Sequence[str]:
    """The options that apply to records of these columns; DataError if no example can be made of them."""
    _check_not_preferences(columns, name, options)
    if not {"texts", "file_name", *IMAGE_COLUMNS, *CHAT_COLUMNS} & set(columns):
        raise DataError(
            f"no images found: {name} has no column image, images, texts, {', '.join(CHAT_COLUMNS)}, "
            f"only {_listed(columns)}; rename one"
        )
    if {"texts", *CHAT_COLUMNS} & set(columns):
        return []
    _find_columns(columns, name, options)
    return COLUMN_OPTIONS


def _check_not_preferences(columns: Collection[str], name: str, options: ReadOptions) -> None:
    found = [column for column in PREFERENCES if column in columns]
    if found and not options.text_column:
        raise DataError(
            f"{name} is preference data, with the columns {', '.join(found)}; use trl's DPOTrainer on the exported "
            "folder, or name the answers to learn with --text-column"
        )


def record_to_example(record: Mapping[str, Any], name: str, root: str | None, options: ReadOptions) -> Example:
    """The example that a record holds; relative image paths start from the folder root.

    ExampleError if it holds none; records of one source may differ.
    """
    try:
        if video := record.get("video") or record.get("videos"):
            raise ExampleError(f"{name} names the video {video}; save frames of it, and name these as its images")
        _check_not_preferences(record, name, options)
        images = record_images(record)
        marked: list[Any] = []
        chat, multi_turn = _chat_of(record), True
        if record.get("texts") is not None:
            pairs = [(clean_text(turn.get("user")), clean_text(turn.get("assistant"))) for turn in record["texts"]]
        elif chat is not None:
            pairs, marked = _parse_chat(chat, name)
            images = [image for image in marked if image is not None] or images
        else:
            pairs, multi_turn = _column_pairs(record, name, options), False
        if marked and len(marked) != len(images):
            raise ExampleError(
                f"{name} marks the positions of {len(marked)} images, but has {len(images)}; correct either"
            )
        if not pairs:
            raise ExampleError(f"{name} has no answer to learn; write one, or remove it")
        located = [_locate_image(image, name, root) for image in images]
        return Example(located, pairs, name, multi_turn and len(pairs) > 1)
    except DataError as error:  # a column is missing here, though other records may have it
        raise ExampleError(str(error)) from None
    except (AttributeError, KeyError, TypeError) as error:  # JSON may hold any type anywhere
        raise ExampleError(f"{name} has an unknown structure: {error}") from None


def record_images(record: Mapping[str, Any]) -> list[Any]:
    """The images in the column `images` or `image`: one, several or none."""
    value = next((record[column] for column in IMAGE_COLUMNS if record.get(column) is not None), None)
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def record_image_path(record: Mapping[str, Any]) -> str | None:
    """The path of the first image, if the record or its chat names one."""
    marked: list[Any] = []
    with suppress(ExampleError, AttributeError, TypeError):  # which reading the example reports
        for message in _chat_of(record) or ():
            _parse_message(message, "", marked)
    first = next((image for image in (*marked, *record_images(record)) if image is not None), None)
    if isinstance(first, Mapping):
        first = first.get("path")
    return first.removeprefix("file://") if isinstance(first, str) else None


def _chat_of(record: Mapping[str, Any]) -> Any:
    """What is in the record's column of messages, None if it has none."""
    return next((record[column] for column in CHAT_COLUMNS if record.get(column) is not None), None)


def clean_text(text: Any) -> str:
    """Text without the white space around it; TypeError for a list or an object."""
    if isinstance(text, (Mapping, list, tuple)):
        raise TypeError(f"a {type(text).__name__} stands where text should be")
    return "" if text is None else str(text).removeprefix("\ufeff").strip()  # a byte order mark of Windows' editors


def _column_pairs(record: Mapping[str, Any], name: str, options: ReadOptions) -> Pairs:
    text_column, prompt_column = _find_columns(record, name, options)
    prompt = clean_text(record.get(prompt_column)) if prompt_column else options.prompt
    texts = record.get(text_column)
    return [(prompt, clean_text(text)) for text in (texts if isinstance(texts, (list, tuple)) else [texts])]


def _find_columns(columns: Collection[str], name: str, options: ReadOptions) -> tuple[str, str | None]:
    """The plain columns that hold the answer and, if there is one, the question."""
    _check_columns([column for column in (options.text_column, options.prompt_column) if column], columns, name)
    text_column = options.text_column or next((column for column in TEXT_COLUMNS if column in columns), None)
    if text_column is None:
        expected = ", ".join(TEXT_COLUMNS)
        raise DataError(f"{name} has no column {expected}, only {_listed(columns)}; name one with --text-column")
    candidates = (column for column in PROMPT_COLUMNS if column in columns and column != text_column)
    return text_column, options.prompt_column or next(candidates, None)


def _check_columns(required: Iterable[str], columns: Collection[str], name: str) -> None:
    if missing := [column for column in required if column not in columns]:
        raise DataError(f"{name} has no column {missing[0]!r}, only {_listed(columns)}; name one of these")


def _listed(columns: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, columns)))


def _parse_chat(chat: Iterable[Mapping[str, Any]], name: str) -> tuple[Pairs, list[Any]]:
    """(prompt, answer) pairs of a chat, and the images whose positions it marks; None for those it does not hold.

    A system message is prepended to the first question, as chat templates of vision-language models do.
    """
    texts: list[str] = []
    images: list[Any] = []
    system = ""
    for message in chat:
        text = _parse_message(message, name, images)
        role = message.get("role") or message.get("from")
        if role == "system" and not texts:
            system = f"{text}\n\n" if text else ""
            continue
        if role is None or ROLES.get(role) != ("assistant" if len(texts) % 2 else "user"):
            raise ExampleError(
                f"{name}: message {len(texts) + 1} is of {role!r}; user and assistant must alternate, the user first"
            )
        texts.append(text if texts else system + text)
    if len(texts) % 2:
        raise ExampleError(f"{name} ends with a question; its answer is missing")
    return list(zip(texts[::2], texts[1::2])), images


def _parse_message(message: Mapping[str, Any], name: str, images: list[Any]) -> str:
    """The text of a message, whose content is a string or OpenAI's or HF's parts; its images are added to `images`."""
    content = message.get("content") if message.get("content") is not None else message.get("value")
    texts: list[str] = []
    for part in [{"text": content}] if isinstance(content, str) else content or []:
        if part.get("text") is not None:
            images += [None] * len(PLACEHOLDER.findall(part["text"]))
            texts.append(PLACEHOLDER.sub("", part["text"]).strip())
        elif "image" in (kind := str(part.get("type"))):
            image = next((part[key] for key in (f"{kind}_url", kind, "image", "url", "path") if part.get(key)), None)
            images.append(image["url"] if isinstance(image, Mapping) and image.get("url") else image)
        else:
            raise ExampleError(f"{name} has a part of type {part.get('type')!r}; only text and images can be read")
    return "\n".join(text for text in texts if text)


def _locate_image(image: Any, name: str, root: str | None) -> Any:
    """An image as it can be opened: a path below root, bytes or a PIL image."""
    if isinstance(image, Mapping):  # an image that the datasets library has not decoded
        image = image["bytes"] if image.get("bytes") else image.get("path")
    if image is None:
        raise ExampleError(f"{name} has an empty value where an image should be; write its path")
    if isinstance(image, bool | int | float | list):
        raise ExampleError(f"{name} has {image!r} where an image should be: a path, or bytes")
    if not isinstance(image, str):
        return image
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except binascii.Error:
            raise ExampleError(f"{name} holds a data: image that is not base64; encode it again") from None
    if image.startswith(("http://", "https://")):
        raise ExampleError(f"{name} names the image {image}; download it and name the file")
    return os.path.join(root or "", image.removeprefix("file://"))
