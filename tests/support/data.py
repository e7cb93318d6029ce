"""Helpers for the tests of data sources: images known by their seed, files as users write them, what a source holds."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest

from nanovlm.data import ReadOptions, open_source
from nanovlm.data.examples import Example
from nanovlm.errors import NanoVLMError
from nanovlm.processing.conversation import dialogue
from nanovlm.processing.image_loading import load_image
from support import noise_image

OPTIONS = ReadOptions(prompt="What?")


def image(seed):
    return noise_image(20, 16, seed)


def png(seed):
    image(seed).save(file := io.BytesIO(), "png")
    return file.getvalue()


def seed_of(file):
    pixels = load_image(file).tobytes()
    return next(seed for seed in range(20) if image(seed).tobytes() == pixels)


def write(path, content):
    """Write bytes, text, or anything else as JSON; a .jsonl gets an object per line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl" and not isinstance(content, (bytes, str)):
        content = "".join(json.dumps(row) + "\n" for row in content)
    elif not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def about(images, *chats, name="example"):
    """An example of conversations about images, each of texts by user and assistant in turn."""
    return Example(images, [dialogue(texts, [None] * len(images)) for texts in chats], name)


def pairs_of(example):
    """Of each answer a tuple: the texts since the answer before it, such as a question, and its own."""
    pairs = []
    for chat in example.chats:
        texts = []
        for turn in chat:
            texts.append(turn.text)
            if turn.role == "assistant":
                pairs.append(tuple(texts))
                texts = []
    return pairs


def summary(example):
    return example.name, [seed_of(image) for image in example.images], pairs_of(example)


def read_all(path, options=OPTIONS):
    """(name, seeds of the images, pairs) of every example, read after pickling the source or stream."""
    source = pickle.loads(pickle.dumps(open_source(str(path), options)))
    if options.stream:
        return [summary(example) for example, _ in source.examples_of(source.all_rows(), {})]
    return [summary(source[i]) for i in range(len(source))]


def check_refused(path, *parts, options=OPTIONS):
    with pytest.raises(NanoVLMError) as error:
        open_source(str(path), options)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message
    return error.value


def llava(*turns, **more):
    pairs = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"id": "7", "conversations": pairs, **more}


def message(role, *parts):
    return {"role": role, "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}


def text(content):
    return {"type": "text", "text": content}


def write_tar(path, files):
    with tarfile.open(path, "w") as tar:
        for name, content in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
