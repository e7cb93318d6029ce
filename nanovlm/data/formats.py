"""One record, a JSON object or a dataset's row, as an example: the_cauldron's turns, chats, or plain columns."""

import base64
import binascii
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.source import COLUMN_OPTIONS, ReadOptions
from nanovlm.errors import DataError

IMAGE_PLACEHOLDER = "<image>"  # marks an image's position in the text of LLaVA and its followers
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "caption", "answer", "captions")
PROMPT_COLUMNS = ("question", "prompt")


def record_to_example(record: Mapping[str, Any], name: str, root: str | None, options: ReadOptions) -> Example:
    """The example that a record holds; relative image paths start from the folder root."""
    try:
        return _record_to_example(record, name, root, options)
    except DataError as error:  # a column is missing here, though other records may have it
        raise ExampleError(str(error)) from None
    except (AttributeError, KeyError, TypeError) as error:  # JSON may hold any type anywhere
        raise ExampleError(f"{name} has an unknown structure: {error}") from None


def _record_to_example(record: Mapping[str, Any], name: str, root: str | None, options: ReadOptions) -> Example:
    images = record_images(record)
    chat = next((record[column] for column in CHAT_COLUMNS if record.get(column) is not None), None)
    if record.get("texts") is not None:
        pairs, multi_turn = _cauldron_turns(record, options), True
    elif chat is not None:
        pairs, inline_images, placeholders = parse_chat(chat, name)
        images, multi_turn = inline_images or images, True
        if placeholders and placeholders != len(images):
            raise ExampleError(f"{name} marks the positions of {placeholders} images, but has {len(images)}")
    else:
        pairs, multi_turn = _column_pairs(record, name, options), False
    if not pairs:
        raise ExampleError(f"{name} has no answer to learn")
    located = [locate_image(image, name, root) for image in images]
    return Example(located, pairs, name, multi_turn and len(pairs) > 1)


def _cauldron_turns(record: Mapping[str, Any], options: ReadOptions) -> list[tuple[str, str]]:
    return [
        (clean_text(turn.get("user")), clean_text(turn.get("assistant")))
        for turn, passes in zip(record["texts"], _turns_passing(record, options))
        if passes
    ]


def _column_pairs(record: Mapping[str, Any], name: str, options: ReadOptions) -> list[tuple[str, str]]:
    text_column, prompt_column = find_columns(record, name, options)
    prompt = clean_text(record.get(prompt_column)) if prompt_column else options.prompt
    texts = record.get(text_column)
    return [(prompt, clean_text(text)) for text in (texts if isinstance(texts, (list, tuple)) else [texts])]


def record_images(record: Mapping[str, Any]) -> list[Any]:
    """The images in the column `images` or `image`: one, several or none."""
    value = record.get("images")
    if value is None:
        value = record.get("image")
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def record_image_path(record: Mapping[str, Any]) -> str | None:
    """The path of the first image, if the record names one."""
    first = next(iter(record_images(record)), None)
    if isinstance(first, Mapping):
        first = first.get("path")
    return first if isinstance(first, str) else None


def clean_text(text: Any) -> str:
    """Text without the white space around it; TypeError for a list or an object."""
    if isinstance(text, (Mapping, list, tuple)):
        raise TypeError(f"a {type(text).__name__} stands where text should be")
    return "" if text is None else str(text).strip()


def _turns_passing(record: Mapping[str, Any], options: ReadOptions) -> list[bool]:
    """Which turns have all the ratings asked for; a turn without a rating passes."""
    ratings = [(record.get(f"{name}_ratings") or [], minimum) for name, minimum in options.min_ratings.items()]
    return [
        all(i >= len(values) or values[i] is None or values[i] >= minimum for values, minimum in ratings)
        for i in range(len(record["texts"]))
    ]


def passes_ratings(record: Mapping[str, Any], options: ReadOptions) -> bool:
    """Whether at least one turn of a record passes options.min_ratings."""
    return not options.min_ratings or not record.get("texts") or any(_turns_passing(record, options))


def parse_chat(chat: Iterable[Mapping[str, Any]], name: str) -> tuple[list[tuple[str, str]], list[Any], int]:
    """(prompt, answer) pairs of a chat, the images inside its messages, and how many image positions it marks.

    A system message is prepended to the first question, as chat templates of vision-language models do.
    """
    texts: list[str] = []
    images: list[Any] = []
    placeholders, system = 0, ""
    for message in chat:
        text, message_images, message_placeholders = parse_message(message, name)
        images += message_images
        placeholders += message_placeholders
        role = message.get("role") or message.get("from")
        if role == "system" and not texts:
            system = text
            continue
        expected = "assistant" if len(texts) % 2 else "user"
        if role is None or ROLES.get(role) != expected:
            raise ExampleError(
                f"{name}: message {len(texts) + 1} is of {role!r}; user and assistant must alternate, the user first"
            )
        if system:
            text, system = f"{system}\n\n{text}", ""
        texts.append(text)
    if len(texts) % 2:
        raise ExampleError(f"{name} ends with a question; its answer is missing")
    return list(zip(texts[::2], texts[1::2])), images, placeholders


def parse_message(message: Mapping[str, Any], name: str) -> tuple[str, list[Any], int]:
    """Text, images and number of image positions of a message, whose content is a string or OpenAI's or HF's parts."""
    content = message.get("content") if message.get("content") is not None else message.get("value")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    texts: list[str] = []
    images: list[Any] = []
    placeholders = 0
    for part in parts:
        if part.get("text") is not None:
            placeholders += part["text"].count(IMAGE_PLACEHOLDER)
            texts.append(part["text"].replace(IMAGE_PLACEHOLDER, "").strip())
        elif "image" in str(part.get("type")):
            placeholders += 1
            image = next((part[key] for key in ("image_url", "image", "url", "path") if part.get(key)), None)
            if isinstance(image, Mapping) and image.get("url"):
                image = image["url"]
            if image is not None:
                images.append(image)
        else:
            raise ExampleError(f"{name} has a part of type {part.get('type')!r}; only text and images can be read")
    return "\n".join(text for text in texts if text), images, placeholders


def applicable_options(columns: Collection[str], name: str, options: ReadOptions) -> Sequence[str]:
    """The options that apply to records of these columns; DataError if they hold no text, or a rating is missing."""
    if "texts" in columns:
        check_columns([f"{rating}_ratings" for rating in options.min_ratings], columns, name)
        return ["min_ratings"]
    if set(CHAT_COLUMNS) & set(columns):
        return []
    find_columns(columns, name, options)
    return COLUMN_OPTIONS


def find_columns(record: Collection[str], name: str, options: ReadOptions) -> tuple[str, str | None]:
    """The plain columns that hold the answer and, if there is one, the question."""
    check_columns([column for column in (options.text_column, options.prompt_column) if column], record, name)
    text_column = options.text_column or next((column for column in TEXT_COLUMNS if column in record), None)
    if text_column is None:
        present = ", ".join(sorted(map(str, record)))
        raise DataError(f"{name} has no column {', '.join(TEXT_COLUMNS)}, only {present}; name one with --text-column")
    candidates = (column for column in PROMPT_COLUMNS if column in record and column != text_column)
    return text_column, options.prompt_column or next(candidates, None)


def check_columns(required: Iterable[str], present: Collection[str], name: str) -> None:
    """DataError if a required column is missing."""
    for column in required:
        if column not in present:
            raise DataError(f"{name} has no column {column!r}, only {', '.join(sorted(present))}")


def locate_image(image: Any, name: str, root: str | None) -> Any:
    """An image as it can be opened: a path below root, bytes or a PIL image."""
    if isinstance(image, Mapping):  # an image that the datasets library has not decoded
        image = image["bytes"] if image.get("bytes") else image.get("path")
    if image is None:
        raise ExampleError(f"{name} has an empty value where an image should be")
    if isinstance(image, bool | int | float | list):
        raise ExampleError(f"{name} has {image!r} where an image should be: a path, or bytes")
    if not isinstance(image, str):
        return image
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except binascii.Error:
            raise ExampleError(f"{name} holds a data: image that is not base64") from None
    if image.startswith(("http://", "https://")):
        raise ExampleError(f"{name} names the image {image}; download it and name the file")
    return os.path.join(root or "", image.removeprefix("file://"))
