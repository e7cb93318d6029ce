"""`nanovlm chat`: questions about images, typed or piped in, one per line. A line that begins with / is a command."""

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.common import files
from nanovlm.cli.options import MODEL_FLAGS, add_record_flags, from_args, load_captioner, model_options, report_missing
from nanovlm.console import is_terminal, print_error, print_text
from nanovlm.errors import ImageError, NanoVLMError, UsageError, is_out_of_memory
from nanovlm.options import CHAT_MAX_NEW_TOKENS, GenerationOptions, ModelOptions
from nanovlm.outputs import relative_name
from nanovlm.processing import VIDEO_EXTENSIONS
from nanovlm.processing.conversation import dialogue

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

HELP = "Ask about images, one question after another."
EXAMPLE = "nanovlm chat photo.jpg"

COMMANDS = "/image FILE asks about another image, /reset forgets the questions, /save FILE writes the chat"
GENERATION_FLAGS = ("temperature", "top_p", "seed", "max_new_tokens", "repetition_penalty")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="images or a video; without any, text alone")
    add_record_flags(parser, GenerationOptions, GENERATION_FLAGS, max_new_tokens=CHAT_MAX_NEW_TOKENS)
    add_record_flags(parser, ModelOptions, MODEL_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Answer questions until there are no more; 1 if a line that was piped in failed."""
    model = model_options(args)
    if report_missing(args.images):
        return 1
    generation = from_args(GenerationOptions, args, max_new_tokens=CHAT_MAX_NEW_TOKENS)
    captioner = load_captioner(model, images=args.images)
    # raises for a model that has no template for a chat of several turns
    captioner.tokenizer.encode_chat(dialogue(["?"] * 3))
    try:
        chat = TerminalChat(captioner, generation, args.images)
    except ImageError as error:
        print_error(str(error))
        return 1
    interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if interactive:
        end = "ctrl-z and enter" if sys.platform == "win32" else "ctrl-d"
        print_error(f"{COMMANDS}; ctrl-c stops an answer, {end} leaves")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its arrow keys)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 is reported later, with its line
    line: str | None = ""
    while line is not None:
        try:
            line = read_line("> " if interactive else "")
            chat.handle(line or "")
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
    return 1 if chat.n_failed and not interactive else 0


class TerminalChat:
    """A chat session on the command line: questions, and commands that begin with /."""

    def __init__(self, captioner: "Captioner", generation: GenerationOptions, paths: Sequence[str]):
        self.captioner = captioner
        self.generation = generation
        self.saved: set[str] = set()  # files written by this chat, which it may overwrite
        self.n_failed = 0
        self.start(paths)

    def start(self, paths: Sequence[str]) -> None:
        """Begin a new session about images or a video."""
        from nanovlm.chat_session import ChatSession
        from nanovlm.processing.video import Video

        are_videos = [Path(path).suffix.lower() in VIDEO_EXTENSIONS for path in paths]
        shown = [Video.read(path) if is_video else path for path, is_video in zip(paths, are_videos)]
        self.session = ChatSession(self.captioner, shown)
        self.paths = paths

    def handle(self, line: str) -> None:
        """Answer a question or run a command; an error is printed in one line, and the chat goes on."""
        line = line.strip()
        command, _, argument = line.partition(" ")
        try:
            match command:
                case "/image":
                    self.open(argument.strip())
                case "/reset":
                    self.session.reset()
                case "/save":
                    self.save(argument.strip())
                case _ if command.startswith("/"):
                    raise UsageError(f"{command} is not a command: {COMMANDS}")
                case _ if line:
                    self.answer(line)
        except BrokenPipeError:
            raise
        except Exception as error:
            self.n_failed += 1
            if isinstance(error, NanoVLMError):
                print_error(str(error))
            elif is_out_of_memory(error):
                print_error(f"not enough memory ({error})")
            elif isinstance(error, OSError):
                print_error(f"{line}: {error.strerror or error}")
            else:
                raise

    def answer(self, question: str) -> None:
        """Print the answer as it is generated."""
        with contextlib.closing(self.session.ask(question, options=self.generation)) as pieces:
            for piece in pieces:
                print_text(piece, end="")
        print(flush=True)
        stats = self.session.stats
        limit = self.captioner.inference.cfg.lm_max_position_embeddings
        if stats.finish_reasons == ["length"] and stats.new_tokens < self.generation.max_new_tokens:
            print_error(f"note: the chat fills the model's context of {limit:,} tokens; /reset forgets the questions")

    def open(self, argument: str) -> None:
        """Start a new chat about the images that an argument names: one path as it stands, or quoted as in a shell."""
        try:
            paths = [argument] if os.path.exists(argument) else shlex.split(argument)
        except ValueError as error:
            raise UsageError(f"/image {argument}: {error}") from None
        if not paths:
            raise UsageError("/image needs a path: /image FILE")
        self.start(paths)

    def save(self, name: str) -> None:
        """Write the chat to a new file, or to one that this chat wrote before: .json is training data, others text."""
        path = Path(name)
        history = self.session.history
        if not name:
            raise UsageError("/save needs a name: /save FILE")
        if path.exists() and os.path.abspath(path) not in self.saved:
            raise UsageError(f"{name} exists already; save under another name")
        if path.suffix == ".json":
            images = [relative_name(image, path.parent) for image in self.paths]
            turns = [turn for pair in history for turn in zip(("user", "assistant"), pair)]
            messages = [{"role": role, "content": text} for role, text in turns]
            text = json.dumps([{"images": images, "messages": messages}], indent=2)
            kind = "JSON that `nanovlm train --data` reads"
        else:
            text = "".join(f"{image}\n" for image in self.paths)
            text += "".join(f"\n> {question}\n{answer}\n" for question, answer in history)
            kind = "plain text"
        if not path.parent.is_dir():
            raise UsageError(f"/save {name}: No such file or directory; name a folder that is there")
        files.replace(path, text.encode("utf-8", "surrogateescape"))  # a path may hold bytes that are not UTF-8
        self.saved.add(os.path.abspath(path))
        print_error(f"{name}: {len(history)} questions and answers as {kind}")


def read_line(prompt: str) -> str | None:
    """A line typed at a prompt, or piped in; None at the end, and where standard input or output is closed."""
    if sys.stdin is None or sys.stdout is None:
        return None
    try:
        return input(prompt)
    except EOFError:
        print(end="\n" if prompt else "")
        return None
