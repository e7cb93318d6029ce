"""What a run writes about itself: lines that survive a kill, what it has done, what failed, and that it is there."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanovlm.console import print_error
from nanovlm.errors import UsageError
from nanovlm.image_processing import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FAILURES = "failures.jsonl"


def relative(picture: str, folder: Path) -> str:
    """A picture's path from a folder, with / everywhere."""
    return Path(os.path.relpath(picture, folder)).as_posix()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Where to write a new file, which then takes path's place: whole, or not at all."""
    new = path.with_name(f".nanovlm-{os.getpid()}.new")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def file_lock(path: Path, place: str) -> Iterator[None]:
    """Hold the file path while this process writes to place; UsageError if another does.

    The system lets go of it however a process ends, so a file that a killed one left behind holds nobody up. Where
    there are no such locks, nobody is held up either.
    """
    with contextlib.ExitStack() as stack:
        while fcntl:
            try:
                file = stack.enter_context(open(path, "ab"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{place}: another run writes captions there; wait for its end, or write elsewhere by --out"
                ) from None
            except OSError:  # a folder that may not be written, a file system without locks
                break
            with contextlib.suppress(FileNotFoundError):  # its last holder may have just removed it
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    stack.callback(path.unlink, missing_ok=True)  # while it is still held
                    break
        yield


class JsonlLog:
    """The objects of a .jsonl file that grows; the last line, if a killed process left it torn, is cut off."""

    def __init__(self, path: Path):
        self.path, self.found = path, []
        data = path.read_bytes() if path.exists() else b""
        whole, _, last = data.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n"), start=1):
            if line.strip():
                self.found.append(self.parse(line, number))
        if last.startswith(b"{") and not is_json(last):
            os.truncate(path, len(data) - len(last))
        elif last.strip():
            self.found.append(self.parse(last, data.count(b"\n") + 1))
            with open(path, "ab") as file:
                file.write(b"\n")

    def parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path}, line {number}, cannot be read: {error}; mend it or move it away") from None
        if not isinstance(row, dict):
            raise UsageError(f"{self.path}, line {number}, holds no object; mend it or move it away")
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "ab", buffering=0) as file:  # one write: whole, or at worst torn at the file's end
            file.write(json_line(row))
        self.found.append(row)


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def json_line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a name that is no Unicode text
        return json.dumps(row).encode() + b"\n"


class ResumeLog(JsonlLog):
    """What a run has done so far: a line of its settings, then rows with file_name and, until it has ended, text."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        super().__init__(path)
        self.settings = {"settings": dict(settings)}
        self.before = self.found[:1]  # the settings of the run that began the file
        self.found = self.found[1:]
        if any("settings" not in row for row in self.before) or any("file_name" not in row for row in self.found):
            raise UsageError(f"{path} is not what a run noted about itself; move it away")

    @property
    def of_another_run(self) -> bool:
        return bool(self.before) and self.before != [self.settings]

    @property
    def texts(self) -> dict[str, str]:
        """What a run that did not end has found, by name."""
        return {row["file_name"]: row["text"] for row in self.found if "text" in row}

    def add(self, row: Mapping[str, Any]) -> None:
        if not self.before:
            self.before = [self.settings]
            with open(self.path, "ab", buffering=0) as file:
                file.write(json_line(self.settings))
        super().add(row)

    def end(self) -> None:
        """Keep the names alone, by which the same command knows that it is done."""
        self.found = [{"file_name": row["file_name"]} for row in self.found]
        if not self.found:
            return self.forget()
        with atomic_write(self.path) as new:
            new.write_bytes(b"".join(map(json_line, self.before + self.found)))

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)
        self.before, self.found = [], []


class FailureLog:
    """The pictures of this run that have no caption, and why: failures.jsonl in the run's home, if there are any."""

    def __init__(self, home: Path):
        self.path, self.count, self.written = home / FAILURES, 0, False
        with contextlib.suppress(OSError):  # a folder that may not be written has other things to say
            self.path.unlink(missing_ok=True)

    def add(self, picture: str, reason: str) -> None:
        self.count += 1
        print_error(f"{printable(picture)}: {reason}")
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as file:  # it was said, at least
            file.write(json_line({"file_name": relative(picture, self.path.parent), "reason": reason}))
            self.written = True
