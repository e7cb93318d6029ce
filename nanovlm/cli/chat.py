"""`nanovlm chat`: questions about images, typed or piped in, one per line. A line that begins with / is a command."""

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.cli.options import (
    add_model_flags,
    from_args,
    load_captioner,
    model_options,
    report_missing,
)
from nanovlm.console import TileProgress, bold, is_terminal, print_error, print_text
from nanovlm.errors import ImageError, NanoVLMError, UsageError, is_out_of_memory
from nanovlm.options import CHAT_MAX_NEW_TOKENS, GenerationOptions

if TYPE_CHECKING:
    from PIL import Image

    from nanovlm.captioner import Captioner
    from nanovlm.processing.video import Video

HELP = "Ask about images, one question after another; /help lists the commands."
EXAMPLE = "nanovlm chat photo.jpg"

COMMANDS = """\
/image PATH ...  start a new chat about other images, or a video
/reset           forget all questions and answers; the images stay
/save FILE       save the chat: a .json can be used by `nanovlm train --data`, any other name is plain text
/help            show this list
ctrl-c           stop an answer; the chat keeps the part generated so far
ctrl-d           leave"""
GENERATION_FLAGS = tuple(f.name for f in fields(GenerationOptions) if f.name not in ("start_with", "schema"))
MAX_HISTORY_LINES = 1000  # of typed lines, kept for later chats


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGE", help="images or a video to ask about; without any, a chat in text alone")
    add_record_flags(parser, GenerationOptions, GENERATION_FLAGS, max_new_tokens=CHAT_MAX_NEW_TOKENS)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer questions until there are no more; 1 if a line that was piped in failed."""
    generation = from_args(GenerationOptions, args)
    model = model_options(args)
    if report_missing(args.images):
        return 1
    try:
        images = load_images(args.images)
    except ImageError as error:
        print_error(str(error))
        return 1
    captioner = load_captioner(model, own_images=bool(args.images))
    # raises for a model that has no template for a chat of several turns
    captioner.tokenizer.encode_chat([{"role": role, "content": "?"} for role in ("user", "assistant", "user")])
    chat = Chat(captioner, generation, args.images, images)
    interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if interactive:
        captioner.inference.on_tile = TileProgress()
        print_error("/help lists the commands; ctrl-d leaves")
    with saved_input_history() if interactive else contextlib.nullcontext():
        for line in read_lines(interactive):
            try:
                chat.handle(line)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print()
    return 1 if chat.n_failed and not interactive else 0


class Chat:
    """A chat session on the command line: questions, and commands that begin with /."""

    def __init__(
        self,
        captioner: "Captioner",
        generation: GenerationOptions,
        paths: Sequence[str],
        images: Sequence["Image.Image | Video"],
    ):
        self.captioner, self.generation = captioner, generation
        self.saved: set[str] = set()  # files written by this chat, which it may overwrite
        self.n_failed = 0
        self.start(paths, images)

    def start(self, paths: Sequence[str], images: Sequence["Image.Image | Video"]) -> None:
        """Begin a new session about these images."""
        from nanovlm.chat_session import ChatSession

        self.session, self.paths = ChatSession(self.captioner, images), list(paths)

    def handle(self, line: str) -> None:
        """Answer a question or run a command; an error is printed in one line, and the chat goes on."""
        try:
            self._handle(line.strip())
        except BrokenPipeError:
            raise
        except NanoVLMError as error:
            self._report(str(error))
        except OSError as error:
            self._report(f"{line.strip()}: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._report(f"not enough memory ({error})")

    def _handle(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        argument = argument.strip()
        if not line:
            return
        if not line.startswith("/"):
            self.answer(line)
        elif command == "/image":
            self.open(argument)
        elif command == "/reset":
            self.session.reset()
        elif command == "/save":
            self.save(argument)
        elif command == "/help":
            for help_line in COMMANDS.splitlines():
                print_error(help_line)
        else:
            raise UsageError(f"{command} is not a command; /help lists the commands")

    def _report(self, message: str) -> None:
        self.n_failed += 1
        print_error(message)

    def answer(self, question: str) -> None:
        """Print the answer as it is generated."""
        with contextlib.closing(self.session.ask(question, options=self.generation)) as pieces:
            for piece in pieces:
                print_text(piece, end="")
        print(flush=True)

    def open(self, argument: str) -> None:
        """Start a new chat about the images that an argument names: one path as it stands, or quoted as in a shell."""
        try:
            paths = [argument] if os.path.exists(argument) else shlex.split(argument)
        except ValueError as error:
            raise UsageError(f"/image {argument}: {error}") from None
        if not paths:
            raise UsageError("/image needs a path: /image PATH")
        self.start(paths, load_images(paths))

    def save(self, name: str) -> None:
        """Write the chat to a new file, or to one that this chat wrote before."""
        if not name:
            raise UsageError("/save needs a name: /save FILE")
        path = Path(name)
        if path.exists() and os.path.abspath(path) not in self.saved:
            raise UsageError(f"{name} exists already; save under another name")
        text = self.as_json(path.parent) if path.suffix == ".json" else self.as_text()
        path.write_bytes(text.encode("utf-8", "surrogateescape"))  # a path may hold bytes that are not UTF-8
        self.saved.add(os.path.abspath(path))

    def as_json(self, folder: Path) -> str:
        """The chat as training data, with image paths relative to folder."""
        messages = []
        for question, answer in self.session.history:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        images = [Path(os.path.relpath(path, folder)).as_posix() for path in self.paths]
        return json.dumps([{"images": images, "messages": messages}], indent=2)

    def as_text(self) -> str:
        paths = "".join(f"{path}\n" for path in self.paths)
        return paths + "".join(f"\n> {question}\n{answer}\n" for question, answer in self.session.history)


def load_images(paths: Sequence[str]) -> list["Image.Image | Video"]:
    from nanovlm.processing.video import load_image_or_video

    return [load_image_or_video(path) for path in paths]


def read_lines(interactive: bool) -> Iterator[str]:
    """Lines typed at a prompt, or piped in."""
    if sys.stdin is None or sys.stdout is None:  # closed
        return
    prompt = ""
    if interactive:
        start, end = (f"\001{code}\002" if code else "" for code in bold(" ", sys.stdout).split(" "))
        prompt = f"{start}> {end}"  # \001 and \002 tell readline that a code takes no room on the screen
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 is reported later, with its line
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()


@contextlib.contextmanager
def saved_input_history() -> Iterator[None]:
    """Keep typed lines for the arrow keys, in this chat and in later ones, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state_home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = Path(state_home, "nanovlm", "history")
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MAX_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
