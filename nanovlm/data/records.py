"""`to_example`: one row as an example. The one place that knows columns and the layouts of chats."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from nanovlm.data.examples import Example, ExampleError, check_answers
from nanovlm.data.splits import split_named, split_of_path
from nanovlm.data.values import MISSING, MISSING_IN_CSV, clean_text, is_empty
from nanovlm.errors import ImageError
from nanovlm.options import ReadOptions
from nanovlm.processing.conversation import Chat, Turn, images_of
from nanovlm.processing.image_loading import decode_data_url, readable_extensions

PROMPT_FLAG = "--prompt"  # places that a question or an answer has been read from
TEXT_FILE = "the text file"
FOLDER_NAME = "name of the folder"  # columns of images in folders
IMAGE_FILE = "image file"
# Usual names of columns, in lower case and with _ for spaces
IMAGE = r"(image|img|picture|photo)s?(_(path|file|name|url|bytes)s?)?"
FILE = r"file(_?name|_?path)?|path"  # of the image, unless another column has it
CHAT = r"messages|conversations?|texts"
ANSWER = r"answers?|responses?|outputs?|completions?"
CAPTION = rf"text|captions?|{FOLDER_NAME.replace(' ', '_')}"
QUESTION = r"questions?|prompts?|query|queries|instructions?"
SYSTEM = r"system(_(prompt|message))?"
LETTERS = "[a-h]"  # of answers to choose from, if there are several such columns
NAMED = r"s?(_?(id|names?|types?|num(ber)?|index|idx))?"
SPLIT = rf"((data_?(set_?)?)?(split|partition|usage)|(cv_?)?k?fold){NAMED}"  # columns whose values are splits
SET = rf"((data_?(set_?)?)?(sub)?set|data|mode|stage|phase|train_?(or_?)?(val_?)?(or_?)?test){NAMED}"  # if names
IS_SPLIT = r"(?:is_?|in_?)?(train|test|val(?:idation)?|dev|eval|hold_?out|held_?out)(?:ing)?(?:_(?:image|set|split))?"
TRUTHS = {"true": 1, "yes": 1, "good": 1, "correct": 1, "false": 0, "no": 0, "bad": 0, "wrong": 0, "rejected": 0}
LEFT_OUT = (
    "text_column", "has {} beside its answer; write it into the question, or leave it out by naming the answer with "
    "--text-column",
)  # fmt: skip
REFUSED = {  # columns that change what the others mean, unless a flag says what to read
    r"(video|audio)s?": ("text_column", "names a {}; save frames of it, and name these as its images"),
    r"(chosen|rejected)(_\w+)?|(wrong|incorrect|negative)_(response|answer|message|output)s?": (
        "text_column", "is preference data, with the column {}; use trl's DPOTrainer on the exported folder, or name "
        "the answers to learn with --text-column",
    ),
    r"(multiple_)?(choice|option|candidate|distractor)s?(_?\w)?": LEFT_OUT,
    r"inputs?|history|contexts?|hints?|passages?|backgrounds?|tools": LEFT_OUT,
    LETTERS: LEFT_OUT,
    r"(image|img|picture|photo)_?\d+": (
        "image_column", "has {}; name all of its images in one list, or the one to read with --image-column"
    ),
}  # fmt: skip
JUDGES: dict[str, Callable[[float], bool]] = {  # columns and numbers, also of truths, that judge an answer
    r"(kto_?)?(label|tag)|(is_)?(correct|right|valid|good|accepted|approved|verified|preferred|desirable)|status|"
    r"preference|feedback|quality|judge?ment|verdict": lambda number: number <= 0,
    r"(is_)?(incorrect|wrong|bad|hallucinat\w+|ignored?|skip(ped)?|excluded?|deleted)": lambda number: number == 1,
    r"((loss|sample)_?)?weights?": lambda number: number != 1,
    r"((human|model|gpt|answer|response)_?)?(scores?|ratings?|rewards?)": lambda number: True,
}
REFUSED_KEYS = {  # of messages
    "tool_calls|function_call": "calls a tool, which is not trained on; remove it",
    rf"{IMAGE}|(video|audio)s?": "has the key {} in a message; write parts, or the row's column images",
    "(?!loss_).*mask|.*_detail|label|score|rating|reward|chosen|rejected": "has {} in a message; write a weight",
    "reasoning(_content)?|thinking": "has {} in a message; write it into the answer, or remove it",
}
CAULDRON = ("system", "user", "assistant")  # keys of a turn
OPTIONS = {"image": "image_column", "question": "prompt_column", "answer": "text_column"}  # by a column's role
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}  # of ShareGPT and Gemma
LOSS_KEYS = ("weight", "loss_weight", "loss_mask", "loss", "train", "training", "trainable")  # of messages
MARK = re.compile("<image>")  # an image's position in the text of LLaVA and its followers
OTHER_MARKS = re.compile(
    r"<\|?(?:image|img|video|audio|vision|picture)[ _-]?(?:\d+|pad|start|here)?\|?>|\[IMG\]"
    r"|<start_of_image>|<bbox>|<ref-object>",
    re.IGNORECASE,
)
BOXES = re.compile(r"(\d+( [01]?\.\d+){4,}(\n|$))+")  # YOLO's
MARKED_BOXES = re.compile("<bbox>|<ref-object>")  # ms-swift's
INSIDE = "with an image behind text: SmolVLM's layout reads it there, nanoVLM's before all text"  # notes of examples
NO_IMAGE = "without an image"
SEVERAL_LINES = "with a text of several lines, learned as one"

MAX_NAME = 4096  # characters of a path
MAX_VALUES = 10_000  # columns, images or texts of a row
# Beginnings of PNG, JPEG, GIF and WebP, which tables of VLMEvalKit hold
BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR)[\w+/=\s]{40,}")


@dataclass(frozen=True, slots=True)
class Record:
    """Values by column, the row's name in messages, and the folder that image paths start from."""

    values: Mapping[str, Any]
    name: str
    folder: str = ""
    classes: Sequence[str] = ()  # columns of names, which are never missing
    is_csv: bool = False
    is_sample: bool = False  # of a tar, whose columns are types of files


def to_example(row: Record, options: ReadOptions) -> Example:
    """The example that a row holds; ExampleError if it holds none, or if it can be read in two ways."""
    try:
        _check_count("columns", row.values)
        example = _read(row, _Columns(row, options), options)
    except ExampleError as error:
        raise ExampleError(f"{row.name} {error}") from None
    except (AttributeError, KeyError, TypeError) as error:  # JSON may hold any type anywhere
        raise ExampleError(f"{row.name} has an unknown structure: {error}") from None
    check_answers(example)
    return example


def _check_count(what: str, values: Sized) -> None:
    """ExampleError for more of something than any context holds."""
    if len(values) > MAX_VALUES:
        raise ExampleError(f"has {len(values):,} {what}; at most {MAX_VALUES:,} are read")


def options_for(columns: Iterable[str], options: ReadOptions) -> ReadOptions:
    """Drop the flags that name no column of this source, if there are other sources that they may mean."""
    if not options.is_shared:
        return options
    absent: dict[str, Any] = {name: None for name in OPTIONS.values() if getattr(options, name) not in columns}
    return replace(options, **absent)


class _Columns:
    """The columns of a row; `read` has those that were read, by role."""

    def __init__(self, row: Record, options: ReadOptions):
        self.written = {column: row.values[column] for column in row.values if not str(column).startswith("__")}
        self.classes = row.classes
        self.missing = MISSING | MISSING_IN_CSV if row.is_csv else MISSING
        self.row = {column: None if self.is_missing(column) else value for column, value in self.written.items()}
        self.usual = {column: re.sub(r"[\s-]+", "_", str(column).strip().lower()) for column in self.row}
        self.options = options
        self.named = [getattr(options, name) for name in OPTIONS.values()]
        self.read: dict[str, str] = {}

    def is_missing(self, column: str) -> bool:
        """True for a text that tools write for a missing value; a class of that name is no such text."""
        value = self.written[column]
        return column not in self.classes and isinstance(value, str) and value.strip() in self.missing

    def find(self, names: str, filled: bool = True) -> list[str]:
        """Columns whose names match; with filled, only those that have a value."""
        found = [column for column, name in self.usual.items() if re.fullmatch(names, name)]
        return [column for column in found if not (filled and is_empty(self.row[column]))]

    def choose(self, role: str, *tiers: list[str]) -> Any:
        """Value of a role, from its flag's column, else from the only candidate of the first tier that has any."""
        given = getattr(self.options, OPTIONS[role])
        flag = f"--{OPTIONS[role].replace('_', '-')}"
        candidates = [given] if given else next(filter(None, tiers), [])
        if given not in (None, *self.row) or not (candidates or role != "answer"):
            missing = f"column {given!r}" if given else "column text, caption or answer"
            listed = ", ".join(sorted(map(str, self.row)))
            raise ExampleError(f"has no {missing}, only {listed or 'none'}; name one with {flag}")
        if len(candidates) > 1:
            raise ExampleError(f"has {' and '.join(map(repr, candidates))}, each may be the {role}; {flag} names it")
        if candidates:
            self.read[role] = candidates[0]
        return self.row[candidates[0]] if candidates else None


def _read(row: Record, columns: _Columns, options: ReadOptions) -> Example:
    for names, (flag, why) in REFUSED.items():
        found = [column for column in columns.find(names) if column not in columns.named]
        if found and getattr(options, flag) is None and (len(found) > 1 or names != LETTERS):
            raise ExampleError(why.format(" and ".join(found)))
    for names, is_rejected in JUDGES.items() if options.text_column is None else ():
        for column in columns.find(names):
            number = _number(columns.row[column])
            if number is not None and column not in columns.named and is_rejected(number):
                judgement = f"{column} {columns.row[column]!r} beside its answer, which may be none to learn"
                raise ExampleError(f"has {judgement}; leave the row out, or name the answers with --text-column")
    written = _images_of(columns, row.is_sample)
    _check_count("images", written)
    images = [_locate(image, row.folder) for image in written]
    chat = columns.find(CHAT)
    asked = columns.find(QUESTION, filled=False)
    tiers = [columns.find(f"{ANSWER}|{CAPTION}")]
    if chat:
        tiers = [columns.find(f"{CHAT}|{ANSWER}|{CAPTION}|{QUESTION}")]  # one beside a chat can be read in two ways
    elif asked or options.prompt_column:
        tiers = [columns.find(ANSWER), columns.find(CAPTION)]
    columns.choose("answer", *tiers, columns.find(f"{ANSWER}|{CAPTION}", filled=False)[:1])
    answer = columns.written[columns.read["answer"]]
    is_chat = columns.read["answer"] in chat
    system = columns.find(SYSTEM)
    before = [Turn("system", (text,)) for column in system if (text := clean_text(columns.row[column]))]
    notes: list[str] = []
    if is_chat:
        if not is_empty(columns.row.get(str(options.prompt_column))):
            raise ExampleError("is a chat, on which --prompt-column has no effect; omit it")
        turns, marked, keys = _read_chat(answer)
        chats = [[*before, *turns]]
        notes += [f"not read: key {key} of messages" for key in keys]
    else:
        asked = [column for column in asked if column != columns.read["answer"]]
        question = columns.choose("question", [name for name in asked if not is_empty(columns.row[name])], asked[:1])
        if "question" in columns.read and is_empty(question):
            raise ExampleError(f"has no question in {columns.read['question']}; write one, or remove it")
        pairs, marked = _pairs(question if "question" in columns.read else options.question, answer)
        chats = [[*before, *pair] for pair in pairs]
    named = [_locate(image, row.folder) for image in marked if not isinstance(image, int | None)]
    if named and images and named != images:
        raise ExampleError(f"names images in its messages and in {columns.read['image']}; remove either")
    images = named or images
    if numbers := [mark for mark in marked if isinstance(mark, int)]:
        if sorted(numbers) != list(range(len(images))):
            raise ExampleError(f"numbers its images {numbers}, which must name each of {len(images)} once, from 0")
        images = [images[number] for number in numbers]
    example = Example(images, [_with_places(chat, len(images)) for chat in chats], row.name)
    notes += _notes_on_answers(example, columns)
    places = {"image": "the chat" if named else "nowhere", "question": "the chat" if is_chat else PROMPT_FLAG}
    for role, column in columns.read.items():
        is_file = column in (FOLDER_NAME, IMAGE_FILE)
        places[role] = f"the {column}" if is_file else f"column {column}"
    splits = _splits(columns)
    split = next((word for word in splits.values() if word != "train"), "train" if splits else "")
    path = row.values.get("__key__") if row.is_sample else next(iter(written), None)
    if not split and isinstance(path, str) and columns.read.get("image") != IMAGE_FILE:
        split = split_of_path(path)
    left = [column for column in columns.row if column not in (*columns.read.values(), *system, *splits)]
    notes += [f"not read: column {column}" for column in left if not is_empty(columns.row[column])]
    if isinstance(answer, Path):
        text = example.chats[0][-1].text
        if BOXES.fullmatch(text):
            raise ExampleError(f"has YOLO's boxes in {answer}; write a text there")
        places["answer"] = TEXT_FILE
        notes += [SEVERAL_LINES] * ("\n" in text)
    notes += [INSIDE] * any(map(_is_inside, example.chats)) + [NO_IMAGE] * (not images)
    return replace(example, places=places, notes=tuple(notes), split=split)


def _splits(columns: _Columns) -> dict[str, str]:
    """The split that each of some columns names, as in split: "val", is_test: true and fold: 3."""
    found = {column: str(columns.row[column]).strip() for column in columns.find(SPLIT)}
    found = {column: split_named(word) or word for column, word in found.items()}
    found |= {column: word for column in columns.find(SET) if (word := split_named(str(columns.row[column])))}
    for column in columns.find(IS_SPLIT):
        match = re.fullmatch(IS_SPLIT, columns.usual[column])
        if match and (number := _number(columns.row[column])) in (0, 1):
            found[column] = match[1] if number else "test" if match[1] == "train" else "train"
    return found


def _number(value: Any) -> float | None:
    """The number that a value is, that of truths 0 and 1; None if it is none."""
    text = str(value).strip().lower()
    with suppress(ValueError):
        return TRUTHS[text] if text in TRUTHS else float(text)
    return None


def _pairs(question: Any, answer: Any) -> tuple[list[list[Turn]], list[Any]]:
    """Conversations of a question with each of its answers, or of each of several questions with its own; and marks."""
    answers = answer if isinstance(answer, (list, tuple)) else [answer]
    _check_count("answers", answers)
    questions = question if isinstance(question, (list, tuple)) else [question]
    questions = questions * max(1, len(answers)) if len(questions) == 1 else questions
    if len(questions) != max(1, len(answers)):
        counts = f"{len(questions)} questions, but {len(answers)} answers"
        raise ExampleError(f"has {counts}; write one for each, or a row for each question")
    read = [_read_parts(one) for one in questions]
    texts = [clean_text(text) for text in answers or [""]]
    turns = [[Turn("user", parts), Turn("assistant", (text,))] for (parts, _), text in zip(read, texts)]
    return turns, max((marks for _, marks in read), key=len)


def _with_places(chat: list[Turn], n: int) -> list[Turn]:
    """The chat with n places of images: its own, or without any the beginning of the user's first turn."""
    if (n_marked := len(images_of(chat))) not in (0, n):
        raise ExampleError(f"marks the positions of {n_marked} images, but has {n}; correct either")
    first = next((turn for turn in chat if turn.role == "user" and n_marked < n), None)
    return [replace(turn, parts=[*[None] * n, *turn.parts]) if turn is first else turn for turn in chat]


def _is_inside(chat: Chat) -> bool:
    """True if a text of the user precedes an image."""
    parts = [part for turn in chat if turn.role == "user" for part in turn.parts]
    return None in parts[parts.count(None) :]


def _notes_on_answers(example: Example, columns: _Columns) -> list[str]:
    """Notes on answers that may stand for a missing value; ExampleError for one that does, or for a mark."""
    notes = []
    is_class = columns.read["answer"] in columns.classes
    for chat, i in () if is_class else example.learned():
        answer = chat[i].text
        if answer in columns.missing:
            problem = f"has the answer {answer!r} to {chat[i - 1].text!r}, which stands for a missing value"
            raise ExampleError(f"{problem}; write it, or remove the example")
        if mark := MARKED_BOXES.search(answer):
            raise ExampleError(f"has the mark {mark[0]} in its answer; write the numbers")
        if answer in MISSING_IN_CSV:
            notes.append(f"learned as a text: the answer {answer!r}")
    return list(dict.fromkeys(notes))


def is_image(name: str) -> bool:
    """True for a file's name, or the kind of a file in a tar, of an image that can be read here."""
    return f".{name.rpartition('.')[2].lower()}" in readable_extensions()


def _images_of(columns: _Columns, is_sample: bool) -> list[Any]:
    """The images of a row; a tar's sample has them by kind, such as png, or left.png, or mask.png beside jpg."""
    usual = columns.find(IMAGE)
    files = [kind for kind, value in columns.row.items() if is_sample and is_image(kind) and value is not None]
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
    value = columns.choose("image", usual, files, columns.find(FILE))
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
            return decode_data_url(image, "holds an image")
        except ImageError as error:
            raise ExampleError(str(error)) from None
    if image.startswith(("http://", "https://")):
        raise ExampleError(f"names the image {image}; download it and name the file")
    if BASE64.match(image):
        raise ExampleError(
            f"has base64 where an image should be, {image[:20]}...; write data:image/png;base64, before it"
        )
    if len(image) > MAX_NAME:
        raise ExampleError(
            f"names the image {image[:20]}..., of {len(image):,} letters; name a file of at most {MAX_NAME:,}"
        )
    is_address = image.startswith("file://")
    return os.path.normpath(os.path.join(folder, unquote(image.removeprefix("file://")) if is_address else image))


def _read_chat(chat: Any) -> tuple[list[Turn], list[Any], list[str]]:
    """The turns of a chat, its images in order, see `_read_parts`, and the keys of messages that are not read.

    The chat is LLaVA's and ShareGPT's, or OpenAI's, or, where no message has a role, the_cauldron's.
    """
    if not isinstance(chat, (list, tuple)):
        raise ExampleError(f"has {type(chat).__name__}, which must be a list of messages")
    _check_count("messages", chat)
    turns: list[Turn] = []
    images: list[Any] = []
    said: list[str] = []
    has_roles = any(message.get("role") or message.get("from") for message in chat)
    keys = {key: None for message in chat for key, value in message.items() if not is_empty(value)}
    known = {"role", "from", "content", "value", *LOSS_KEYS} if has_roles else CAULDRON
    unread = [str(key) for key in keys if key not in known]
    for names, why in REFUSED_KEYS.items():
        if found := [key for key in unread if re.fullmatch(names, key.lower())]:
            raise ExampleError(why.format(found[0]))
    cauldron = ({"role": role, "content": turn[role]} for turn in chat for role in CAULDRON if role in turn)
    for message in chat if has_roles else cauldron:
        role = message.get("role") or message.get("from")
        role = ROLES.get(role, role)  # type: ignore[arg-type]  # JSON may hold any type
        content = message.get("content") if message.get("content") is not None else message.get("value")
        parts, found = _read_parts(content, role == "assistant")
        if found and role != "user":
            raise ExampleError(f"has an image in a message of {role!r}; only the user shows images")
        images += found
        if role == "system" and not said:
            turns += [Turn(role, parts)] if parts else []
            continue
        said.append(str(role))
        if role != ("user" if len(said) % 2 else "assistant"):
            n = len(said)
            raise ExampleError(f"has a message {n} of {role!r}; user and assistant must alternate, the user first")
        learned = role != "assistant" or _is_learned(message)
        turns.append(Turn(role, ["".join(parts)] if role == "assistant" else parts, learned))  # type: ignore[arg-type]
    if len(said) % 2:
        raise ExampleError("ends with a question; its answer is missing")
    if said and not any(turn.learned for turn in turns if turn.role == "assistant"):
        raise ExampleError("learns none of its answers, as all have a weight of 0; remove it")
    return turns, images, unread


def _is_learned(message: Mapping[str, Any]) -> bool:
    """False for an answer with a weight of 0; ExampleError for weights that are not read, such as a part's."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    if any(part.get(key) not in (None, 1) for part in parts for key in LOSS_KEYS):
        raise ExampleError("has a weight of its own at a part of an answer; give it to the whole message, or remove it")
    weights = [message[key] for key in LOSS_KEYS if message.get(key) is not None]
    if odd := [weight for weight in weights if weight not in (0, 1)]:
        raise ExampleError(f"has the weight {odd[0]!r}; only 0 and 1, or false and true, are read")
    return all(weights)


def _read_parts(content: Any, is_answer: bool = False) -> tuple[list[str | None], list[Any]]:
    """The parts of a message, None in the places of images, and these; marks in an answer are text.

    An image is None where there is only a mark, and a number where it has the position in the row's images.
    """
    parts: list[str | None] = []
    images: list[Any] = []
    is_list = isinstance(content, list)
    for part in content if is_list else [content]:
        part = part if isinstance(part, Mapping) and is_list else {"type": "text", "text": part}
        kind = str(part.get("type") or ("text" if part.get("text") is not None else "image"))
        if kind == "text":
            text = clean_text(part.get("text"), strip=False)
            pieces = [text] if is_answer else MARK.split(text)
            parts += [piece for at, text in enumerate(pieces) for piece in (None, text)[at == 0 :]]
            images += [None] * (len(pieces) - 1)
        elif "image" in kind:
            # `datasets` fills every key of each part
            names = (f"{kind}_url", kind, "image_url", "image", "url", "path")
            images.append(next((part[name] for name in names if not is_empty(part.get(name))), part.get("index")))
            parts += [None]
        else:
            raise ExampleError(f"has a part of type {kind!r}; only text and images can be read")
    if not is_list:  # white space beside a mark separates it from the text
        parts = [part for part in parts if part is None or part.strip()]
    texts = [at for at, part in enumerate(parts) if part is not None]
    for at in texts[:1] if not is_list or texts[:1] == [0] else ():
        parts[at] = str(parts[at]).lstrip()
    for at in texts[-1:] if not is_list or texts[-1:] == [len(parts) - 1] else ():
        parts[at] = str(parts[at]).rstrip()
    if not is_answer and (mark := OTHER_MARKS.search("".join(part for part in parts if part))):
        raise ExampleError(f"has the mark {mark[0]} in its question; write <image>, or remove it")
    return [part for part in parts if part != ""], images
