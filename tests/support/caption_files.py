"""Captions in files, read and edited as a person does, without the code that writes them."""

import json
from pathlib import Path

from nanovlm.data.jsonl import read_jsonl
from support.cli import IMAGE_NAMES

OUTPUTS = ["txt", "captions.jsonl"]


class Killed(BaseException):
    """What `kill -9` does to a process, as far as its files can tell."""


def stem(name):
    return str(Path(name).with_suffix(""))


def read_captions(path):
    """The texts of a table by file name, each name once."""
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert len({row["file_name"] for row in rows}) == len(rows)
    return {row["file_name"]: row["text"] for row in rows}


class CaptionFiles:
    """The captions of a folder in one kind of output, by the names of images without extensions."""

    def __init__(self, folder, kind, extension=".txt"):
        self.folder, self.kind, self.extension = folder, kind, extension
        self.is_table = kind != "txt"
        self.path = folder / kind
        self.out = self.path if self.is_table else kind  # the value of --out
        self.failures = folder / (f"{kind}.failures.jsonl" if self.is_table else "failures.jsonl")

    def failed(self):
        """The reasons why images have no caption, by their names."""
        return {row["file_name"]: row["reason"] for row in map(json.loads, self.failures.read_text().splitlines())}

    def file_name(self, name):
        """The image's name with its extension, .png unless it is one of IMAGE_NAMES."""
        return next((image for image in IMAGE_NAMES if stem(image) == name), f"{name}.png")

    def texts(self):
        if self.is_table:
            return {stem(name): text for name, text in read_captions(self.path).items()} if self.path.exists() else {}
        files = {path: path.read_text("utf-8") for path in self.folder.rglob(f"[!.]*{self.extension}")}
        assert all(text.endswith("\n") for text in files.values())
        return {stem(path.relative_to(self.folder)): text[:-1] for path, text in files.items()}

    def edit(self, **texts):
        """Write texts by the names of their images; other rows and columns of a table stay."""
        if self.is_table:
            rows = {row["file_name"]: row for row in (read_jsonl(self.path) if self.path.exists() else [])}
            for name, text in texts.items():
                rows.setdefault(self.file_name(name), {"file_name": self.file_name(name)})["text"] = text
            self.path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
            return
        for name, text in texts.items():
            (self.folder / f"{name}{self.extension}").write_text(f"{text}\n", "utf-8")

    def litter(self):
        """Files that a run must not leave behind."""
        return [p.name for p in self.folder.rglob("*") if p.name.endswith(".lock") or ".tmp" in p.name]
