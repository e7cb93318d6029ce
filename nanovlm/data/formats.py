"""One record, a JSON object or a data set's row, as an example: turns, messages, conversations or plain columns."""

import base64
import binascii
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovlm.data.examples import Example, ExampleError
from nanovlm.data.source import ReadOptions
from nanovlm.errors import DataError

MARKER = "<image>"  # how LLaVA and its followers write the place of a picture
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
CHATS = ("messages", "conversations", "conversation")
ANSWERS, QUESTIONS = ("text", "caption", "answer", "captions"), ("question", "prompt")  # names of plain columns


def record_example(record: Mapping[str, Any], name: str, root: str | None, reading: ReadOptions) -> Example:
    """The example that a record holds; its pictures' relative paths start at the folder root."""
    try:
        return _example(record, name, root, reading)
    except DataError as error:  # of columns that others may have
        raise ExampleError(str(error)) from None
    except (AttributeError, KeyError, TypeError) as error:  # JSON may hold anything anywhere
        raise ExampleError(f"{name} is laid out in no way that is known here: {error}") from None


def _example(record: Mapping[str, Any], name: str, root: str | None, reading: ReadOptions) -> Example:
    pictures, chats = record_pictures(record), [record[c] for c in CHATS if record.get(c) is not None]
    if (turns := record.get("texts")) is not None:
        kept = [turn for turn, passes in zip(turns, passing(record, reading)) if passes]
        answers, chain = [(words(turn.get("user")), words(turn.get("assistant"))) for turn in kept], True
    elif chats:
        answers, named, marks = conversation(chats[0], name)
        pictures, chain = named or pictures, True
        if marks and marks != len(pictures):
            raise ExampleError(f"{name} marks the places of {marks} pictures, but has {len(pictures)}")
    else:
        answer, question = columns(record, name, reading)
        said = record.get(answer)
        prompt = words(record.get(question)) if question else reading.prompt
        answers = [(prompt, words(text)) for text in (said if isinstance(said, (list, tuple)) else [said])]
        chain = False
    if not answers:
        raise ExampleError(f"{name} has no answer to learn")
    return Example([located(picture, name, root) for picture in pictures], answers, name, chain and len(answers) > 1)


def record_pictures(record: Mapping[str, Any]) -> list[Any]:
    """What stands in `images` or `image`: one picture, several or none."""
    found = record.get("images")
    found = record.get("image") if found is None else found
    if found is None or found == "":
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def record_key(record: Mapping[str, Any]) -> str | None:
    """The first picture's path, if the record names one."""
    first = next(iter(record_pictures(record)), None)
    if isinstance(first, Mapping):
        first = first.get("path")
    return first if isinstance(first, str) else None


def words(text: Any) -> str:
    """Text without the white space around it, which belongs to files and not to answers."""
    if isinstance(text, (Mapping, list, tuple)):
        raise TypeError(f"a {type(text).__name__} stands where words should be")
    return "" if text is None else str(text).strip()


def passing(record: Mapping[str, Any], reading: ReadOptions) -> list[bool]:
    """Which of a record's turns have ratings as high as asked; a turn that nobody rated passes."""
    given = [(record.get(f"{rating}_ratings") or [], least) for rating, least in reading.min_ratings.items()]
    return [
        all(i >= len(marks) or marks[i] is None or marks[i] >= least for marks, least in given)
        for i in range(len(record["texts"]))
    ]


def wanted(record: Mapping[str, Any], reading: ReadOptions) -> bool:
    """Whether a record has a turn left."""
    return not reading.min_ratings or not record.get("texts") or any(passing(record, reading))


def conversation(chat: Iterable[Mapping[str, Any]], name: str) -> tuple[list[tuple[str, str]], list[Any], int]:
    """The questions and answers of a chat, the pictures that stand in it, and how many places it marks.

    A system message has no turn of its own in generation: it is the beginning of the first question.
    """
    turns, pictures, marks, system = [], [], 0, ""
    for message in chat:
        text, shown, places = content(message, name)
        pictures += shown
        marks += places
        role = message.get("role") or message.get("from")
        if role == "system" and not turns:
            system = text
            continue
        if role not in ROLES or ROLES[role] != ("user", "assistant")[len(turns) % 2]:
            raise ExampleError(
                f"{name}: message {len(turns) + 1} is of {role!r}; user and assistant must take turns, the user first"
            )
        if system:
            text, system = f"{system}\n\n{text}", ""
        turns.append(text)
    if len(turns) % 2:
        raise ExampleError(f"{name} ends with a question; its answer is missing")
    return list(zip(turns[::2], turns[1::2])), pictures, marks


def content(message: Mapping[str, Any], name: str) -> tuple[str, list[Any], int]:
    """Text, pictures and the number of pictures' places of one message, a string or OpenAI's or HF's list of parts."""
    given = message.get("content") if message.get("content") is not None else message.get("value")
    texts, pictures, marks = [], [], 0
    for part in [{"type": "text", "text": given}] if isinstance(given, str) else given or []:
        if part.get("text") is not None:
            marks += part["text"].count(MARKER)
            texts.append(part["text"].replace(MARKER, "").strip())
        elif "image" in str(part.get("type")):
            marks += 1
            shown = next((part[k] for k in ("image_url", "image", "url", "path") if part.get(k)), None)
            shown = shown.get("url") if isinstance(shown, Mapping) and shown.get("url") else shown
            pictures += [shown] if shown is not None else []
        else:
            raise ExampleError(f"{name} has a part of type {part.get('type')!r}; only text and images can be read")
    return "\n".join(text for text in texts if text), pictures, marks


def columns(record: Collection[str], name: str, reading: ReadOptions) -> tuple[str, str | None]:
    """Which plain columns hold the answer and, if any does, the question."""
    asked = [column for column in (reading.text_column, reading.prompt_column) if column]
    check_columns(asked, record, name)
    answer = reading.text_column or next((column for column in ANSWERS if column in record), None)
    if answer is None:
        there = ", ".join(sorted(map(str, record)))
        raise DataError(f"{name} has no column {', '.join(ANSWERS)}, only {there}; name one by --text-column")
    question = reading.prompt_column or next((c for c in QUESTIONS if c in record and c != answer), None)
    return answer, question


def check_columns(asked: Iterable[str], there: Collection[str], name: str) -> None:
    for column in asked:
        if column not in there:
            raise DataError(f"{name} has no column {column!r}, only {', '.join(sorted(there))}")


def located(picture: Any, name: str, root: str | None) -> Any:
    """A picture as it can be opened: a path, bytes or a PIL image."""
    if isinstance(picture, Mapping):  # how `datasets` hands on a picture that it has not decoded
        picture = picture["bytes"] if picture.get("bytes") else picture.get("path")
    if isinstance(picture, str):
        if picture.startswith("data:"):
            try:
                return base64.b64decode(picture.partition(",")[2], validate=True)
            except binascii.Error:
                raise ExampleError(f"{name} holds a data: picture that is no base64") from None
        if picture.startswith(("http://", "https://")):
            raise ExampleError(f"{name} names the picture {picture}; download it and name the file")
        return os.path.join(root or "", picture.removeprefix("file://"))
    if picture is None:
        raise ExampleError(f"{name} has an empty place where a picture should be")
    return picture


def find_root(path: Path, pictures: Iterable[str], reading: ReadOptions) -> str:
    """The folder in which a JSON file's pictures lie: the one named, or one beside the file that has the first."""
    first = next((p for p in pictures if not p.startswith(("data:", "http://", "https://"))), None)
    if first is None or os.path.isabs(first):
        return reading.images or ""
    near = [path.parent, *_folders(path.parent), *_folders(path.parent.parent)]
    for folder in [Path(reading.images)] if reading.images else near:
        if (folder / first).is_file():
            return str(folder)
    where = reading.images or f"{path.parent}, the folders in it or beside it"
    raise DataError(f"{path} names the picture {first}, which is not in {where}; name its folder by --images FOLDER")


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # no right to look there
        return []
