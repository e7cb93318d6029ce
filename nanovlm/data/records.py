"""`to_example`: one row as an example. The one place that knows columns and the layouts of chats."""

import base64
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovlm.data.examples import Example, ExampleError, check_answers
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions

Row = Mapping[str, Any]  # by column, with the reader's own "__folder__", where image paths start, and "__name__"

IMAGES = (
    "images", "image", "image_path", "image_paths", "image_file", "image_files", "image_name", "image_url",
    "image_bytes", "img", "imgs", "img_path", "picture", "pictures", "photo", "photos",
)  # fmt: skip
FILES = ("file_name", "filename", "file", "file_path", "filepath", "path")  # of the image, unless another column has it
CHATS = ("messages", "conversations", "conversation", "texts")
ANSWERS = ("answer", "answers", "response", "output")
FOLDER_NAME = "name of the folder"  # column of images in one folder per label
CAPTIONS = ("text", "caption", "captions", FOLDER_NAME.replace(" ", "_"))
QUESTIONS = ("question", "prompt", "query", "instruction")
CHOICES = ("choices", "options", "candidates")
PREFERENCES = ("chosen", "rejected", "rejected_response")  # the columns of trl and ms-swift
OTHER_MEDIA = ("video", "videos", "audio", "audios")
OPTIONS = {"image": "image_column", "question": "prompt_column", "answer": "text_column"}  # by a column's role
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip
WEIGHTS = ("weight", "loss", "train", "training", "trainable")  # keys of a message that say whether it is learned
MARK = re.compile("<image>")  # an image's position in the text of LLaVA and its followers
OUTER_MARKS = re.compile(r"^(\s*<image>)+|(<image>\s*)+$")
OTHER_MARKS = re.compile(
    r"<\|?(?:image|img|video|audio|vision|picture)[ _-]?(?:\d+|pad|start|here)?\|?>|\[IMG\]|<start_of_image>",
    re.IGNORECASE,
)
MOVED = "not read: position of an image within the text or in a later turn: all images come first"
NO_IMAGE = "without an image"  # notes of examples


def to_example(row: Row, options: ReadOptions) -> Example:
    """The example that a row holds; ExampleError if it holds none, or if it can be read in two ways."""
    name = row["__name__"]
    try:
        example = _read(row, _Columns(row, options), options)
    except ExampleError as error:
        raise ExampleError(f"{name} {error}") from None
    except (AttributeError, KeyError, TypeError) as error:  # JSON may hold any type anywhere
        raise ExampleError(f"{name} has an unknown structure: {error}") from None
    check_answers(example)
    return example


def plain_row(row: dict[str, Any], features: Any, folder: str, name: str) -> Row:
    """A row of `datasets` with the names of its classes; of a tar's sample, its .txt and the record in its .json."""
    for column, feature in (features or {}).items():
        if hasattr(feature, "int2str") and row.get(column) is not None and row[column] >= 0:
            row[column] = feature.int2str(row[column])
    if "__key__" in row:
        name = f"{name} {row['__key__']}"
        record = row.pop("json", None)
        row = (record if isinstance(record, dict) else {}) | row
        if (text := row.pop("txt", None)) is not None:
            row["text"] = text
        pages = [column for column in row if _is_image_file(column) and re.search(r"\d\.\w+$", column)]
        pages.sort(key=lambda column: [int(number) for number in re.findall(r"\d+", column)])
        if images := [image for column in pages if (image := row.pop(column)) is not None]:
            row["images"] = images
    return row | {"__folder__": folder, "__name__": name}


def is_empty(value: Any) -> bool:
    """True for no value: None, NaN, an empty text or list."""
    return value is None or value != value or (isinstance(value, (str, bytes, list, tuple, dict)) and not value)


class _Columns:
    """The columns of a row; `read` has those that were read, by role."""

    def __init__(self, row: Row, options: ReadOptions):
        self.row = {column: value for column, value in row.items() if not str(column).startswith("__")}
        self.options = options
        self.read: dict[str, str] = {}
        self.usual: dict[str, list[str]] = defaultdict(list)  # usual name -> columns, which may differ in case
        for column in self.row:
            self.usual[re.sub(r"[\s-]+", "_", str(column).strip().lower())].append(column)

    def find(self, names: Sequence[str], filled: bool = True) -> list[str]:
        """The columns of usual names, if filled only those that have a value."""
        found = [column for name in names for column in self.usual.get(name, ())]
        return [column for column in found if not (filled and is_empty(self.row[column]))]

    def choose(self, role: str, *tiers: Sequence[str]) -> Any:
        """The value of a role: of its flag's column, else of the only candidate of the first tier that has any."""
        given, flag = getattr(self.options, OPTIONS[role]), f"--{OPTIONS[role].replace('_', '-')}"
        if given and given not in self.row:
            raise ExampleError(f"has no column {given!r}, only {self.listed()}; {flag} names one of these")
        candidates = [given] if given else next(filter(None, tiers), ())
        if len(candidates) > 1:
            raise ExampleError(f"has {' and '.join(map(repr, candidates))}, each may be the {role}; {flag} names it")
        if not candidates:
            return None
        self.read[role] = candidates[0]
        return self.row[candidates[0]]

    def listed(self) -> str:
        return ", ".join(sorted(map(str, self.row))) or "none"


def _read(row: Row, columns: _Columns, options: ReadOptions) -> Example:
    if media := columns.find(OTHER_MEDIA):
        raise ExampleError(f"names a {media[0]}; save frames of it, and name these as its images")
    if (found := columns.find(PREFERENCES, filled=False)) and not options.text_column:
        raise ExampleError(
            f"is preference data, with the columns {', '.join(found)}; use trl's DPOTrainer on the exported folder, "
            "or name the answers to learn with --text-column"
        )
    images = [_locate(image, row["__folder__"]) for image in _images_of(columns, "__key__" in row)]
    answer, is_chat = _answer_of(columns, options)
    answers = answer if isinstance(answer, (list, tuple)) and not is_chat else [answer]
    if not is_chat:
        question = _question_of(columns, options)
        answer = [{"role": "user", "content": question}, {"role": "assistant", "content": (*answers, None)[0]}]
    system = columns.find(("system",))
    pairs, learned, marked, moved = _read_chat(answer, [clean_text(columns.row[column]) for column in system])
    pairs += [(pairs[0][0], clean_text(text)) for text in answers[1:]]
    named = [_locate(image, row["__folder__"]) for image in marked if image is not None]
    if named and images and named != images:
        raise ExampleError(f"names images in its messages and in {columns.read['image']}; remove either")
    images = named or images
    if marked and len(marked) != len(images):
        raise ExampleError(f"marks the positions of {len(marked)} images, but has {len(images)}; correct either")
    image = columns.read.get("image", "in the chat" if named else "none")
    question = columns.read.get("question", "in the chat" if is_chat else "--prompt")
    read = {*columns.read.values(), *system}
    left = [column for column, value in columns.row.items() if column not in read and not is_empty(value)]
    notes = [f"reading image {image}, question {question}, answer {columns.read['answer']}"]
    notes += [f"not read: column {column}" for column in left] + [MOVED] * moved + [NO_IMAGE] * (not images)
    return Example(images, pairs, row["__name__"], is_chat and len(pairs) > 1, learned, tuple(notes))


# --------------------------------------------------------------------------------------------------- images


def _is_image_file(kind: str) -> bool:
    return f".{kind.rpartition('.')[2].lower()}" in readable_extensions()


def _images_of(columns: _Columns, is_sample: bool) -> list[Any]:
    """The images of a row; a tar's sample has them by kind, such as png, or left.png, or mask.png beside jpg."""
    usual = columns.find(IMAGES)
    files = [kind for kind, value in columns.row.items() if is_sample and _is_image_file(kind) and value is not None]
    if is_sample and not (usual or files):
        raise ExampleError("has no image of the types that the first samples have; write one, or remove it")
    usual += [kind for kind in files if "." not in kind]
    values = [columns.row[column] for column in usual]
    firsts = [value[0] if isinstance(value, (list, tuple)) else value for value in values]
    held = [column for column, first in zip(usual, firsts) if isinstance(first, (bytes, Mapping))]
    if len(held) == 1:  # the others name what this one holds
        usual = held
    elif all(value in (values[0], [values[0]]) for value in values):
        usual = usual[:1]
    value = columns.choose("image", usual, files, columns.find(FILES))
    if is_empty(value):
        columns.read.pop("image", None)
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _locate(image: Any, folder: str) -> Any:
    """An image as it can be opened: a path from folder, bytes or a PIL image."""
    if isinstance(image, Mapping):  # of `datasets`, not decoded, or OpenAI's
        image = image.get("bytes") or image.get("path") or image.get("url")
    if is_empty(image) or isinstance(image, bool | int | float | list):
        raise ExampleError(f"has {image!r} where an image should be: a path, or bytes")
    if not isinstance(image, str):
        return image
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except ValueError:
            raise ExampleError("holds a data: image that is not base64; encode it again") from None
    if image.startswith(("http://", "https://")):
        raise ExampleError(f"names the image {image}; download it and name the file")
    return os.path.normpath(os.path.join(folder, image.removeprefix("file://")))


# ---------------------------------------------------------------------------------------------------- texts


def _answer_of(columns: _Columns, options: ReadOptions) -> tuple[Any, bool]:
    """The answer, the answers or the chat of a row, and whether it is a chat."""
    chats = columns.find(CHATS)
    if chats:
        tiers = [columns.find((*CHATS, *ANSWERS, *CAPTIONS, *QUESTIONS))]  # another beside a chat is read in two ways
    elif options.prompt_column or columns.find(QUESTIONS, filled=False):
        tiers = [columns.find(ANSWERS), columns.find(CAPTIONS)]
    else:
        tiers = [columns.find((*ANSWERS, *CAPTIONS))]
    answer = columns.choose("answer", *tiers)
    if "answer" not in columns.read:
        if empty := columns.find((*ANSWERS, *CAPTIONS, *CHATS), filled=False):
            raise ExampleError(f"has an empty answer in {empty[0]}; write it, or remove the example")
        raise ExampleError(
            f"has no column {', '.join((*CAPTIONS[:3], *ANSWERS))}, only {columns.listed()}; name one with --text-column"
        )
    is_chat = columns.read["answer"] in chats
    if is_chat and options.prompt_column:
        raise ExampleError("is a chat, on which --prompt-column has no effect; omit it")
    return answer, is_chat


def _question_of(columns: _Columns, options: ReadOptions) -> Any:
    if (choices := columns.find(CHOICES)) and not (options.text_column and options.prompt_column):
        raise ExampleError(
            f"has {choices[0]} beside its answer; write them into the question, or leave them out by naming "
            "--prompt-column and --text-column"
        )
    names = [column for column in columns.find(QUESTIONS, filled=False) if column != columns.read["answer"]]
    question = columns.choose("question", [name for name in names if not is_empty(columns.row[name])], names[:1])
    if "question" in columns.read and is_empty(question):
        raise ExampleError(f"has no question in {columns.read['question']}; write one, or remove it")
    return question if "question" in columns.read else options.question


def clean_text(value: Any) -> str:
    """Text without the white space around it, with \\n as its only line end; "" for a missing value."""
    if isinstance(value, Path):
        if value.exists() and not value.is_file():  # a pipe would block
            raise ExampleError("has a text that is not a file")
        try:
            value = value.read_text(encoding="utf-8-sig")  # Windows' editors write a byte order mark
        except FileNotFoundError:
            raise ExampleError(f"has no text: there is no {value}; write it, or remove the image") from None
        except UnicodeDecodeError as error:
            raise ExampleError(f"has a text that is not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except OSError as error:
            raise ExampleError(f"has a text that cannot be read: {error}") from None
    if isinstance(value, (Mapping, list, tuple, bool, bytes)):
        raise ExampleError(f"has {str(value)[:40]}, of type {type(value).__name__}, which must be text")
    if is_empty(value) or value in (float("inf"), -float("inf")):
        return ""
    return str(value).replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff").strip()


def _read_chat(chat: Any, system: list[str]) -> tuple[list[tuple[str, str]], tuple[bool, ...], list[Any], bool]:
    """Pairs of a chat, which of them are learned (() for all), its images (None for a mark), and if one was moved.

    The chat is the_cauldron's, LLaVA's and ShareGPT's, or OpenAI's. The first question follows what a system says, as
    in the chat templates of vision-language models.
    """
    if not isinstance(chat, (list, tuple)):
        raise ExampleError(f"has {type(chat).__name__}, which must be a list of messages")
    said: list[str] = []
    learned: list[bool] = []
    images: list[Any] = []
    moved = False
    for message in _messages(chat):
        role = message.get("role") or message.get("from")
        content = message.get("content") if message.get("content") is not None else message.get("value")
        if message.get("tool_calls") or message.get("function_call"):
            raise ExampleError("calls a tool, which is not trained on; remove it")
        text, found = _read_parts(content)
        kind = ROLES.get(role)  # type: ignore[arg-type]
        if kind != "assistant":
            images += found
            moved = moved or bool((found and (said or kind == "system")) or MARK.search(OUTER_MARKS.sub("", text)))
            text = MARK.sub("", text).strip()
            if mark := OTHER_MARKS.search(text):
                raise ExampleError(f"has the mark {mark[0]} in its question; write <image>, or remove it")
        if kind == "system" and not said:
            system.append(text)
            continue
        if kind != ("assistant" if len(said) % 2 else "user"):
            raise ExampleError(
                f"has a message {len(said) + 1} of {role!r}; user and assistant must alternate, the user first"
            )
        if kind == "assistant":
            if isinstance(content, list) and any("image" in str(part.get("type")) for part in content):
                raise ExampleError("has an image in an answer; remove it")
            learned.append(_is_learned(message))
        said.append("\n\n".join(filter(None, [*system, text])) if not said else text)
    if len(said) % 2:
        raise ExampleError("ends with a question; its answer is missing")
    if learned and not any(learned):
        raise ExampleError("learns none of its answers, as all have a weight of 0; remove it")
    return list(zip(said[::2], said[1::2])), () if all(learned) else tuple(learned), images, moved


def _messages(chat: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in chat:
        if "user" in message or "assistant" in message:  # the_cauldron's
            yield {"role": "user", "content": message.get("user")}
            yield {"role": "assistant", "content": message.get("assistant")}
        else:
            yield message


def _is_learned(message: Mapping[str, Any]) -> bool:
    values = [message[key] for key in WEIGHTS if message.get(key) is not None]
    if odd := [value for value in values if value not in (0, 1)]:
        raise ExampleError(f"has a message with the weight {odd[0]!r}; only 0 and 1, or false and true, are read")
    return all(values)


def _read_parts(content: Any) -> tuple[str, list[Any]]:
    """The text of a message, with <image> for each of its images, and these, None for one that is only a mark."""
    texts: list[str] = []
    images: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        part = part if isinstance(part, Mapping) and isinstance(content, list) else {"type": "text", "text": part}
        kind = str(part.get("type") or ("text" if part.get("text") is not None else "image"))
        if kind == "text":
            texts.append(clean_text(part.get("text")))
            images += [None] * len(MARK.findall(texts[-1]))
        elif "image" in kind:
            names = (
                f"{kind}_url",
                kind,
                "image_url",
                "image",
                "url",
                "path",
            )  # `datasets` fills every key of each part
            images.append(next((part[name] for name in names if not is_empty(part.get(name))), None))
            texts.append("<image>")
        else:
            raise ExampleError(f"has a part of type {kind!r}; only text and images can be read")
    return "\n".join(filter(None, texts)), images
