"""Splits: whether files, folders and rows belong to the training examples, by names as the datasets library knows."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

WORD = r"(train(?:ing|val)?|test(?:ing)?|eval|evaluation|val|valid|validation|dev)"  # VOC has trainval
# A split's own name, also with a year, a shard and its hash: train, val2017, train-00000-of-00001-0f1e2d3c
SPLIT = re.compile(rf"{WORD}(?:[\W_]*(?:\d+|of|part|shard))*(?:-[0-9a-f]{{8,}})?")
INSIDE = re.compile(rf"(?<![a-z]){WORD}(?![a-z])")


def split_named(name: str) -> str:
    """The split that a name is, or "": a name that only contains the word is none."""
    found = SPLIT.fullmatch(name.strip().lower())
    return _usual(found[1]) if found else ""


def _usual(word: str) -> str:
    return "train" if word.startswith("train") else word


def split_of_path(path: str) -> str:
    """The split that the outermost such folder of a relative path, or the innermost of a whole one, names, or ""."""
    folders = path.split("/")[:-1]
    return next(filter(None, map(split_named, folders[::-1] if folders[:1] == [""] else folders)), "")


class Splits:
    """The splits that the paths of a folder's files name.

    A name is a split if it is such a word, or if a name beside it differs in such a word alone: train_images and
    val_images. `level` is the first level of folders where all are splits; classes may have such names below it.
    """

    def __init__(self, names: Sequence[str], is_image: Callable[[str], bool], is_table: Callable[[str], Any]):
        self.is_table = is_table
        folders = {os.path.dirname(name) for name in names if is_image(name)}
        paths = {parent for name in names for parent in _parents(os.path.dirname(name))}
        paths |= {os.path.splitext(name)[0] for name in names if is_table(name)}
        self.named = {path: split_named(os.path.basename(path)) for path in paths}
        twins: dict[str, dict[str, str]] = defaultdict(dict)
        for path in paths:
            if found := INSIDE.search(name := os.path.basename(path).lower()):
                rest = name[: found.start()] + "*" + name[found.end() :]
                twins[os.path.join(os.path.dirname(path), re.sub(r"\d+", "", rest))][path] = _usual(found[1])
        for named in twins.values():
            self.named |= named if len(set(named.values())) > 1 else {}
        levels = zip(*map(_parents, folders))
        self.level = next((k for k, here in enumerate(levels) if all(map(self.named.__getitem__, here))), None)

    def of(self, name: str) -> str:
        """The split of a file, or "": the outermost folder that is one decides, else the name of a table or shard."""
        paths = _parents(os.path.dirname(name))[self.level or 0 :]
        paths += [os.path.splitext(name)[0]] if self.is_table(name) else []
        return next(filter(None, map(self.named.__getitem__, paths)), "")

    def classes(self, name: str) -> list[str]:
        """The folders of a file without that of its split."""
        paths = _parents(os.path.dirname(name))
        named = next((k for k, path in enumerate(paths) if self.named[path]), None)
        place = named if self.level is None else self.level
        return [os.path.basename(path) for k, path in enumerate(paths) if k != place or len(paths) == 1]


def _parents(folder: str) -> list[str]:
    """A relative folder's parents and itself, the outermost first; [] for the one where all start."""
    parts = folder.split(os.sep) if folder else []
    return [os.sep.join(parts[: k + 1]) for k in range(len(parts))]
