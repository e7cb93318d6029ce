"""`nanovlm chat`: questions about pictures, typed or piped in, one per line; a line that begins with / is a command."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovlm.cli.options import GenerationOptions, ModelOptions, add_generation_flags, load_captioner
from nanovlm.console import bold, print_error
from nanovlm.errors import ImageError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

HELP = "Ask about pictures, one question after another; /help lists the commands."
EXAMPLE = "nanovlm chat photo.jpg"

COMMANDS = """\
/image PATH ...  talk about other pictures: a new chat, for the model sees pictures before it hears words
/reset           forget what was said; the pictures stay
/save FILE       keep the chat: a .json can be learned from by train --data, any other name is plain text
/help            this list
ctrl-c           stop an answer; what it said so far counts
ctrl-d           leave"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pictures", nargs="*", metavar="PICTURE", help="pictures to ask about; without any, a chat in text alone")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="maximum length of an answer (default: 256)")
    add_generation_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer questions about args.pictures until there are no more; 1 if a piped line failed."""
    from nanovlm.image_processing import load_image

    generation = GenerationOptions.from_args(args)
    try:
        pictures = [load_image(name) for name in args.pictures]
    except ImageError as error:
        print_error(str(error))
        return 1
    captioner = load_captioner(ModelOptions.from_args(args), own_images=bool(args.pictures))
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    try:
        captioner.tokenizer.encode_chat(turns)
        chat = Chat(captioner, generation)
        chat.show(args.pictures, pictures)
    except ValueError as error:  # no chat template; tiles without a name
        raise UsageError(error) from None
    typed = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    if typed:
        print_error("/help lists what can be said beside questions; ctrl-d leaves")
    with remembered() if typed else contextlib.nullcontext():
        for line in lines(typed):
            try:
                chat.hear(line)
            except KeyboardInterrupt:
                if not typed:
                    raise
                print()
    return 1 if chat.failed and not typed else 0


class Chat:
    """A conversation, and what is said in it that is no question."""

    def __init__(self, captioner: "Captioner", generation: GenerationOptions):
        self.captioner, self.options = captioner, generation.as_kwargs()
        self.names: list[str] = []
        self.saved: set[str] = set()  # files of ours, that may be written over
        self.failed = 0

    def show(self, names: Sequence[str], pictures: Sequence) -> None:
        from nanovlm.chat_session import ChatSession

        self.conversation, self.names = ChatSession(self.captioner, pictures), list(names)

    def hear(self, line: str) -> None:
        """Do what one line asks for, or complain in one line."""
        from nanovlm.image_processing import load_image

        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        try:
            if not word:
                return
            if not word.startswith("/"):
                self.answer(line.strip())
            elif word == "/image":
                names = [rest] if os.path.exists(rest) else shlex.split(rest)
                if not names:
                    raise ValueError("/image wants a picture: /image PATH")
                self.show(names, [load_image(name) for name in names])
            elif word == "/reset":
                self.conversation.reset()
            elif word == "/save":
                self.save(rest)
            elif word == "/help":
                print(COMMANDS, file=sys.stderr, flush=True)
            else:
                raise ValueError(f"{word} is no command; /help lists those there are")
        except BrokenPipeError:
            raise
        except Exception as error:
            if not isinstance(error, (ValueError, OSError)) and not is_out_of_memory(error):
                raise
            self.failed += 1
            print_error(str(error) or "not enough memory")

    def answer(self, question: str) -> None:
        with contextlib.closing(self.conversation.ask(question, **self.options)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print(flush=True)

    def save(self, name: str) -> None:
        """Write the chat into a new file, or one that was saved before."""
        from nanovlm.bulk.resume_log import relative

        if not name:
            raise ValueError("/save wants a name: /save FILE")
        path = Path(name)
        if path.exists() and os.path.abspath(path) not in self.saved:
            raise ValueError(f"{name} exists already; save under another name")
        history = self.conversation.history
        if path.suffix == ".json":
            turns = [(role, words) for pair in history for role, words in zip(("user", "assistant"), pair)]
            messages = [{"role": role, "content": words} for role, words in turns]
            images = [relative(picture, path.parent) for picture in self.names]
            text = json.dumps([{"images": images, "messages": messages}], indent=2)
        else:
            text = "".join(f"{picture}\n" for picture in self.names)
            text += "".join(f"\n> {question}\n{answer}\n" for question, answer in history)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))  # a picture's name may be no text
        self.saved.add(os.path.abspath(path))


def lines(typed: bool) -> Iterator[str]:
    """What a person types, or what is piped in."""
    if sys.stdin is None:
        return
    prompt = "> "
    if typed:
        start, end = (f"\001{code}\002" if code else "" for code in bold(" ", sys.stdout).split(" "))
        prompt = f"{start}> {end}"  # readline must know what takes no room
    else:
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text will be told in a line
    while True:
        try:
            yield input(prompt) if typed else input()
        except EOFError:
            if typed:
                print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print()


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Keep what is typed for the arrow keys, here and in later chats, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = Path(home, "nanovlm", "history")
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
