"""`to_example`: one row as an example. The one place that knows columns and the layouts of chats."""

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovlm.data.examples import Example, ExampleError
from nanovlm.options import ReadOptions
from nanovlm.processing.image_loading import readable_extensions

IMAGES = (
    "images", "image", "image_path", "image_paths", "image_file", "image_files", "image_name", "image_url",
    "image_bytes", "img", "imgs", "img_path", "picture", "pictures", "photo", "photos",
)  # fmt: skip
FILES = ("file_name", "filename", "file", "file_path", "filepath", "path")  # of the image, unless another column has it
CHATS = ("messages", "conversations", "conversation", "texts")
ANSWERS = ("answer", "answers", "response", "output")
CAPTIONS = ("text", "caption", "captions")
QUESTIONS = ("question", "prompt", "query", "instruction")
CHOICES = ("choices", "options", "candidates")
PREFERENCES = ("chosen", "rejected", "rejected_response")  # the columns of trl and ms-swift
OTHER_MEDIA = ("video", "videos", "audio", "audios")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
WEIGHTS = ("weight", "loss", "train", "training", "trainable")  # keys of a message that say whether it is learned
MARK = re.compile("<image>")  # an image's position in the text of LLaVA and its followers
OTHER_MARKS = re.compile(
    r"<\|?(?:image|img|video|audio|vision|picture)[ _-]?(?:\d+|pad|start|here)?\|?>|\[IMG\]|<start_of_image>",
    re.IGNORECASE,
)
MISSING = ("nan", "<na>")  # as pandas writes a missing value into text
MOVED = "position of an image within the text or in a later turn: all images come first"


class _Columns:
    """The columns of a row by role; what was read and what was not is kept for the lines of a run."""

    def __init__(self, row: Mapping[str, Any], name: str):
        self.row = {column: value for column, value in row.items() if not str(column).startswith("__")}
        self.name = name
        self.read: dict[str, str] = {}  # role -> column
        self.usual: dict[str, list[str]] = {}  # usual name -> columns, which may differ in case
        for column in self.row:
            self.usual.setdefault(re.sub(r"[\s-]+", "_", str(column).strip().lower()), []).append(column)

    def named(self, names: Sequence[str]) -> list[str]:
        """Columns of usual names that have a value."""
        return [column for name in names for column in self.usual.get(name, ()) if not is_empty(self.row[column])]

    def present(self, names: Sequence[str]) -> list[str]:
        return [column for name in names for column in self.usual.get(name, ())]

    def choose(self, role: str, flag: str, given: str | None, *tiers: Sequence[str]) -> str | None:
        """The column of a role: the one of the flag, else the only candidate of the first tier that has any."""
        if given:
            if given not in self.row:
                raise ExampleError(
                    f"{self.name} has no column {given!r}, only {self.listed()}; {flag} names one of these"
                )
            candidates = [given]
        else:
            candidates = next((found for tier in tiers if (found := self.named(tier))), [])
            candidates = candidates or next((found for tier in tiers if (found := self.present(tier))), [])[:1]
        if len(candidates) > 1:
            raise ExampleError(
                f"{self.name} has {' and '.join(map(repr, candidates))}, each may be the {role}; {flag} names it"
            )
        if candidates:
            self.read[role] = candidates[0]
        return candidates[0] if candidates else None

    def listed(self) -> str:
        return ", ".join(sorted(map(str, self.row))) or "none"

    def unread(self) -> tuple[str, ...]:
        read = {*self.read.values(), *self.present(("system",))}
        return tuple(f"column {column}" for column in self.row if column not in read and not is_empty(self.row[column]))


def is_empty(value: Any) -> bool:
    """Whether there is no value: None, NaN, an empty text or list."""
    return value is None or value != value or (isinstance(value, (str, bytes, list, tuple, dict)) and not value)


def to_example(row: Mapping[str, Any], options: ReadOptions) -> Example:
    """The example that a row holds; ExampleError if it holds none, or if it can be read in two ways."""
    name = row["__name__"]
    columns = _Columns(row, name)
    try:
        if media := columns.named(OTHER_MEDIA):
            raise ExampleError(f"{name} names a {media[0]}; save frames of it, and name these as its images")
        if (found := columns.present(PREFERENCES)) and not options.text_column:
            raise ExampleError(
                f"{name} is preference data, with the columns {', '.join(found)}; use trl's DPOTrainer on the exported "
                "folder, or name the answers to learn with --text-column"
            )
        images = _images_of(row, columns, options)
        pairs, learned, marked, moved = _turns_of(columns, options)
        named = [image for image in marked if image is not None]
        if named and images and named != images:
            raise ExampleError(f"{name} names images in its messages and in {columns.read['image']}; remove either")
        images = named or images
        if marked and len(marked) != len(images):
            raise ExampleError(
                f"{name} marks the positions of {len(marked)} images, but has {len(images)}; correct either"
            )
        located = [_locate(image, name, row["__folder__"]) for image in images]
        is_chat = columns.read.get("answer") in columns.present(CHATS)
        question = columns.read.get("question", "in the chat" if is_chat else "--prompt")
        answer = "name of the folder" if row.get("__labels__") else columns.read["answer"]
        image = columns.read.get("image", "in the chat" if named else "none")
        return Example(
            located, pairs, name, is_chat and len(pairs) > 1, learned,
            columns=f"image {image}, question {question}, answer {answer}",
            left_out=columns.unread() + ((MOVED,) if moved else ()),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:  # JSON may hold any type anywhere
        raise ExampleError(f"{name} has an unknown structure: {error}") from None


# --------------------------------------------------------------------------------------------------- images


def _images_of(row: Mapping[str, Any], columns: _Columns, options: ReadOptions) -> list[Any]:
    if "__files__" in row:
        return _files_of_sample(row["__files__"], columns, options)
    column = options.image_column
    if not column:
        filled = columns.named(IMAGES)
        held = [name for name in filled if _holds_bytes(columns.row[name])]
        values = [columns.row[name] for name in filled]
        if len(held) == 1:  # the others name what this one holds
            column = held[0]
        elif len(filled) > 1 and all(value in (values[0], [values[0]]) for value in values):
            column = filled[0]
    column = columns.choose("image", "--image-column", column, IMAGES, FILES)
    value = columns.row[column] if column else None
    if is_empty(value):
        columns.read.pop("image", None)
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _files_of_sample(files: Mapping[str, Any], columns: _Columns, options: ReadOptions) -> list[Any]:
    """The images among a tar sample's files: one, or pages in the order of their numbers; not a mask beside it."""
    images = {
        kind: kind.rpartition(".")[0]
        for kind in files
        if f".{kind.rpartition('.')[2].lower()}" in readable_extensions()
    }
    images = {kind: stem for kind, stem in images.items() if files[kind] is not None}
    main = [kind for kind, stem in images.items() if not stem]
    pages = [kind for kind, stem in images.items() if re.search(r"\d$", stem)]
    if options.image_column:
        chosen = [kind for kind in files if kind == options.image_column]
    else:
        chosen = main or pages or list(images)
        if len(chosen) > 1 and chosen is not pages:
            raise ExampleError(
                f"{columns.name} has the images {' and '.join(chosen)}; --image-column names the one to read"
            )
    if not chosen:
        raise ExampleError(
            f"{columns.name} has no image of the types that the first samples have; write one, or remove it"
        )
    columns.row |= {kind: True for kind in files if files[kind] is not None and kind not in chosen}  # named as not read
    columns.read["image"] = "files" if len(chosen) > 1 else chosen[0]
    return [files[kind] for kind in sorted(chosen, key=lambda kind: [int(n) for n in re.findall(r"\d+", kind)])]


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_holds_bytes, value))
    return not isinstance(value, (str, int, float)) and value is not None


def _locate(image: Any, name: str, folder: str) -> Any:
    """An image as it can be opened: a path from folder, bytes or a PIL image."""
    if isinstance(image, Mapping):  # of `datasets`, not decoded, or OpenAI's
        image = image.get("bytes") or image.get("path") or image.get("url")
    if is_empty(image) or isinstance(image, bool | int | float | list):
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
    return os.path.normpath(os.path.join(folder, image.removeprefix("file://")))


# ---------------------------------------------------------------------------------------------------- texts

Turns = tuple[list[tuple[str, str]], tuple[bool, ...], list[Any], bool]  # pairs, learned, images marked, whether moved


def _turns_of(columns: _Columns, options: ReadOptions) -> Turns:
    has_question = bool(options.prompt_column or columns.present(QUESTIONS))
    answers: list[tuple[str, ...]] = [ANSWERS, CAPTIONS] if has_question else [(*ANSWERS, *CAPTIONS)]
    chats = columns.named(CHATS)
    if chats and not options.text_column:
        answers = [(*CHATS, *ANSWERS, *CAPTIONS, *QUESTIONS)]  # any of them beside a chat can be read in two ways
    column = columns.choose("answer", "--text-column", options.text_column, *answers)
    if column is None:
        raise ExampleError(f"{columns.name} has no column {', '.join(CAPTIONS)} or {', '.join(ANSWERS)}, only "
                           f"{columns.listed()}; name one with --text-column")  # fmt: skip
    if column in columns.present(CHATS):
        if options.prompt_column:
            raise ExampleError(f"{columns.name} is a chat, on which --prompt-column has no effect; omit it")
        return _chat(columns.row[column], columns)
    if (choices := columns.named(CHOICES)) and not (options.text_column and options.prompt_column):
        raise ExampleError(
            f"{columns.name} has {choices[0]} beside its answer; write them into the question, or leave them out by "
            "naming --prompt-column and --text-column"
        )
    others = [name for name in QUESTIONS if name != column]
    asked = columns.choose("question", "--prompt-column", options.prompt_column, others)
    if asked is None:
        question = options.question
    elif is_empty(columns.row[asked]):
        raise ExampleError(f"{columns.name} has no question in {asked}; write one, or remove it")
    else:
        question = clean_text(columns.row[asked], columns.name)
    question, n_marks, moved = _without_marks(question, columns.name)
    question = _with_system(columns, [], question)
    texts = columns.row[column]
    texts = texts if isinstance(texts, (list, tuple)) else [texts]
    pairs = [(question, clean_text(text, columns.name)) for text in texts]
    _check_answers(pairs, columns.name)
    return pairs, (), [None] * n_marks, moved


def _check_answers(pairs: Sequence[tuple[str, str]], name: str) -> None:
    if not pairs:
        raise ExampleError(f"{name} has no answer to learn; write one, or remove it")
    for prompt, answer in pairs:
        if not answer or answer.lower() in MISSING:
            problem = f"the answer {answer!r}" if answer else "an empty answer"
            raise ExampleError(f"{name} has {problem} to {prompt!r}; write it, or remove the example")


def clean_text(value: Any, name: str) -> str:
    """Text without the white space around it, with \\n as its only line end; "" for a missing value."""
    if isinstance(value, Path):
        if value.exists() and not value.is_file():  # a pipe would block
            raise ExampleError(f"{name}: its text is not a file")
        try:
            value = value.read_text(encoding="utf-8-sig")  # Windows' editors write a byte order mark
        except UnicodeDecodeError as error:
            raise ExampleError(f"{name}: its text is not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except OSError as error:
            raise ExampleError(f"{name}: its text cannot be read: {error}") from None
    if isinstance(value, (Mapping, list, tuple, bool, bytes)):
        raise ExampleError(f"{name} has {str(value)[:40]}, of type {type(value).__name__}, which must be text")
    if is_empty(value) or value in (float("inf"), -float("inf")):
        return ""
    return str(value).replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff").strip()


def _with_system(columns: _Columns, systems: Sequence[str], question: str) -> str:
    """The first question after what a system says, as chat templates of vision-language models have it."""
    keyed = [clean_text(columns.row[column], columns.name) for column in columns.named(("system",))]
    return "\n\n".join(text for text in (*keyed, *systems, question) if text)


def _without_marks(question: str, name: str) -> tuple[str, int, bool]:
    """A question without its <image>s, their number, and whether one stood within the text."""
    n = len(MARK.findall(question))
    bare = MARK.sub("", question).strip()
    if found := OTHER_MARKS.search(bare):
        raise ExampleError(f"{name} has the mark {found[0]} in its question; write <image>, or remove it")
    inner = re.sub(r"^(\s*<image>)+|(<image>\s*)+$", "", question)
    return bare, n, bool(MARK.search(inner))


def _chat(chat: Any, columns: _Columns) -> Turns:
    """The turns of a chat: the_cauldron's, LLaVA's and ShareGPT's, or OpenAI's."""
    name = columns.name
    if not isinstance(chat, (list, tuple)):
        raise ExampleError(f"{name} has {type(chat).__name__}, which must be a list of messages")
    texts: list[str] = []
    systems: list[str] = []
    learned: list[bool] = []
    marked: list[Any] = []
    is_moved = False
    for message in _messages(chat):
        role = message.get("role") or message.get("from")
        if message.get("tool_calls") or message.get("function_call"):
            raise ExampleError(f"{name} calls a tool, which is not trained on; remove it")
        content = message.get("content") if message.get("content") is not None else message.get("value")
        if role == "system" and not texts:
            text, n, _ = _without_marks(_text_of_parts(content, marked, name), name)
            is_moved = is_moved or bool(n)
            systems.append(text)
            continue
        if role is None or ROLES.get(role) != ("assistant" if len(texts) % 2 else "user"):
            raise ExampleError(
                f"{name}: message {len(texts) + 1} is of {role!r}; user and assistant must alternate, the user first"
            )
        if len(texts) % 2:
            if isinstance(content, list) and any("image" in str(part.get("type")) for part in content):
                raise ExampleError(f"{name} has an image in an answer; remove it")
            texts.append(_text_of_parts(content, [], name))
            learned.append(_is_learned(message, name))
            continue
        text, n, moved = _without_marks(_text_of_parts(content, marked, name), name)
        is_moved = is_moved or moved or bool(n and texts)
        texts.append(text if texts else _with_system(columns, systems, text))
    if len(texts) % 2:
        raise ExampleError(f"{name} ends with a question; its answer is missing")
    pairs = list(zip(texts[::2], texts[1::2]))
    if pairs and not any(learned):
        raise ExampleError(f"{name} learns none of its answers, as all have a weight of 0; remove it")
    _check_answers([pair for pair, is_learned in zip(pairs, learned) if is_learned], name)
    return pairs, () if all(learned) else tuple(learned), marked, is_moved


def _messages(chat: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in chat:
        if "user" in message or "assistant" in message:  # the_cauldron's
            yield {"role": "user", "content": message.get("user")}
            yield {"role": "assistant", "content": message.get("assistant")}
        else:
            yield message


def _is_learned(message: Mapping[str, Any], name: str) -> bool:
    for key in WEIGHTS:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise ExampleError(f"{name} has the {key} {value!r}; only 0 and 1, or false and true, are read")
        if value is not None and not value:
            return False
    return True


def _text_of_parts(content: Any, marked: list[Any], name: str) -> str:
    """The text of a string or a list of parts, with <image> for each image; marked takes these."""
    texts: list[str] = []
    for part in [{"type": "text", "text": content}] if not isinstance(content, list) else content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = str(part.get("type") or ("text" if part.get("text") is not None else "image"))
        if kind == "text":
            text = clean_text(part.get("text"), name)
            marked += [None] * len(MARK.findall(text))
            texts.append(text)
        elif "image" in kind:
            image = _image_of_part(part)
            marked.append(image["url"] if isinstance(image, Mapping) and image.get("url") else image)
            texts.append("<image>")
        else:
            raise ExampleError(f"{name} has a part of type {kind!r}; only text and images can be read")
    return "\n".join(text for text in texts if text)


def _image_of_part(part: Mapping[str, Any]) -> Any:
    """The image of a part, None if it is only a mark; `datasets` fills every key of every part."""
    if part.get("type") == "text":
        return None
    keys = (f"{part.get('type')}_url", str(part.get("type")), "image_url", "image", "url", "path")
    return next((part[key] for key in keys if not is_empty(part.get(key))), None)
