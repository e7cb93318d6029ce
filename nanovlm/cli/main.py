"""The command line: what a person types, what they read, and how it ends (0 done, 1 failed, 2 wrong use)."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from nanovlm import EMBEDDED, PROMPT, __version__
from nanovlm.console import print_error
from nanovlm.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaint is one line."""

    def error(self, message: str):
        print_error(f"{self.prog}: {message} (see {self.prog} --help)")
        self.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The program nanovlm: a verb and its flags; returns the exit code."""
    parser = Parser(
        prog="nanovlm",
        description="Caption pictures, answer questions, serve, train and export models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "".join(f"  {example}\n" for _, _, example in VERBS.values()),
    )
    parser.add_argument("--version", action="version", version=f"nanovlm {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        function, _, example = VERBS[verb]
        words = {"help": function.__doc__, "description": function.__doc__, "epilog": f"example: {example}"}
        add_flags(verb, verbs.add_parser(verb, **words))
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser)
    return run(parser.parse_args(argv))


def door(verb: str, argv: Sequence[str] | None = None) -> int:
    """One verb as a program of its own: generate.py and train.py."""
    parser = Parser(description=VERBS[verb][0].__doc__)
    add_flags(verb, parser)
    return run(parser.parse_args(argv))


def add_flags(verb: str, parser: Parser) -> None:
    function, flags, _ = VERBS[verb]
    flags(parser)
    parser.set_defaults(run=function, prog=parser.prog)


def run(args: argparse.Namespace) -> int:
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a caption outside the terminal's alphabet is no failure
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: print_error(f"note: {message}")
            return args.run(args)
    except UsageError as error:
        print_error(f"{args.prog}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader of our output has left, as `head` does
            print_error(f"{args.prog}: {error}")
        if sys.stdout is not None:  # Python, leaving, would complain again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def caption_flags(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "pictures",
        nargs="*",
        metavar="PICTURE",
        help="files; folders and quoted patterns, whose captions are written to files; - is a picture on standard "
        "input; none is the sample picture",
    )
    add("--list", metavar="FILE", help="more names, one a line or as find -print0 writes them; - is standard input")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help=f"what to ask of each picture ({PROMPT!r}); given again, another question, for which it is not read again",
    )
    asked.add_argument("--length", choices=("short", "normal", "long"), help="ask for a caption so long")
    add("--out", metavar="FILE", help=".jsonl, .csv or .parquet of file_name and text; txt: beside each (of a folder)")
    add(
        "--existing",
        choices=("skip", "overwrite", "append", "prepend"),
        help="what becomes of captions already there (skip)",
    )
    add("--prefix", metavar="TEXT", help="put before each caption in a file, as it stands")
    add("--suffix", metavar="TEXT", help="put after it")
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="pictures of a folder that run at once, a small model's on each core (16, or 128 where each is one image)",
    )
    add("--max-new-tokens", type=int, metavar="N", help="longest answer (128; --length: short 48, long 384)")
    add("--samples", type=int, default=1, metavar="N", help="answers per picture, which is read once (1)")
    speaking_flags(parser)
    add("--json", action="store_true", help="one object per picture and prompt, with token counts and timings")
    add("--stats", action="store_true", help="timings and peak memory on standard error")


def model_flags(parser: Parser) -> None:
    """Which model speaks, and where."""
    add = parser.add_argument
    add("--model", default=EMBEDDED, metavar="FOLDER_OR_HUB_ID", help="a folder or owner/name (the embedded model)")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--quantize", choices=("int8",), help="make the language model's weights 8 bits long")
    add("--max-tiles", type=int, metavar="N", help="cut a picture into N tiles at most: faster, coarser (all)")
    add("--no-upscale", dest="upscale", action="store_false", help="do not enlarge a picture to get more tiles of it")


def speaking_flags(parser: Parser) -> None:
    """Which model speaks, where and how."""
    model_flags(parser)
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="X", help="0 says the likeliest, 1 samples as learned (0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest tokens (0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="among the likeliest that make up P (1: all)")
    add("--min-p", type=float, default=0.0, metavar="P", help="among those P times as likely as the likeliest (0: all)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 makes repeats less likely (1)")
    add("--seed", type=int, metavar="N", help="the same samples every time")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="decode single pictures by a compiled step; a minute or two, once (if it is there)",
    )


def caption(args: argparse.Namespace) -> int:
    """Caption pictures, or answer a prompt about each; without arguments, the sample picture."""
    from nanovlm.cli.caption import caption_pictures
    from nanovlm.cli.caption_files import caption_files, names_many

    return caption_files(args) if names_many(args) else caption_pictures(args)


def chat_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("pictures", nargs="*", metavar="PICTURE", help="what to talk about; none is a chat of words alone")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (256)")
    speaking_flags(parser)


def chat(args: argparse.Namespace) -> int:
    """Ask about pictures, one question after another; /help lists what else can be said."""
    from nanovlm.cli.chat import chat_about

    return chat_about(args)


def serve_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="an address of this machine; any that others reach needs a key (127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes any that is free (8000)")
    add("--api-key", metavar="KEY", help="what clients must send; or NANOVLM_API_KEY, which ps does not show")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name to answer to, of a proxy in front, say",
    )
    add("--allow-remote", action="store_true", help="fetch pictures from http(s) URLs, of public addresses only")
    add("--rows", type=int, default=32, metavar="N", help="answers said at once (32)")
    add(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait, --max-body each; more are told to come again (64)",
    )
    add("--max-body", type=int, default=20 * 2**20, metavar="BYTES", help="longest request (20 MiB)")
    add("--max-pixels", type=int, default=40_000_000, metavar="N", help="largest picture (40,000,000)")
    add(
        "--timeout",
        type=float,
        default=120,
        metavar="S",
        help="seconds an answer may take, waiting included (120)",
    )
    model_flags(parser)
    parser.set_defaults(compile=False)  # that is for answers one by one


def serve(args: argparse.Namespace) -> int:
    """Serve a page to ask by hand, and OpenAI's chat completions at /v1 for programs."""
    try:
        from nanovlm.serving.server import serve_model
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("models", "nanovlm"):
            raise
        raise UsageError(f"{error.name} is missing; pip install 'nanovlm[serve]'") from None
    return serve_model(args)


def train_flags(parser: Parser) -> None:
    from dataclasses import fields

    from nanovlm.training.config import ADAPTERS, FINETUNING, SCENES

    add = parser.add_argument
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--data", nargs="+", action="extend", metavar="PATH[@SHARE]", help="your pictures and words")
    task.add_argument("--recipe", choices=("scenes",), help="scenes: make the embedded model again, from nothing")
    add("--out", metavar="FOLDER", help="where the model goes; run again to go on where it stopped")
    add("--model", metavar="FOLDER_OR_HUB_ID", help="what to begin with (the embedded model)")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--prompt", metavar="TEXT", help=f"the question where there are only captions ({PROMPT!r})")
    add("--images", metavar="FOLDER", help="where the pictures lie that a .json names (found beside it)")
    add("--text-column", metavar="NAME", help="which column holds the answers (text, caption or answer)")
    add("--prompt-column", metavar="NAME", help="which column holds the questions (question or prompt)")
    add("--min-rating", action="append", metavar="NAME=N", help="only turns rated so, as formatting=3 (FineVision)")
    add("--stream", action="store_true", default=None, help="learn from a Hub data set while it is downloaded")
    add("--validation", type=float, metavar="N", help="hold out a share below 1, or a number of examples (0)")
    add("--on-bad-example", choices=("skip", "stop"), help="what becomes of one that cannot be used (stop)")
    add("--check-data", action="store_true", default=None, help="read all, count, show three examples; train nothing")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    for f in fields(SCENES):
        flag, usual = "--" + f.name.replace("_", "-"), getattr(FINETUNING, f.name)
        others = {"adapters": getattr(ADAPTERS, f.name), "scenes": getattr(SCENES, f.name)}
        told = [str(usual), *(f"{who}: {value}" for who, value in others.items() if value != usual)]
        help = f"{f.metadata['help']} ({'; '.join(told)})"
        if f.type is bool:
            add(flag, action=argparse.BooleanOptionalAction, help=help)
        else:
            add(flag, type=f.type, metavar="N", choices=f.metadata.get("choices") or None, help=help)


def train(args: argparse.Namespace) -> int:
    """Train a model; what was saved is never lost: the same command goes on where the last one stopped."""
    from nanovlm.training.distributed import run_and_exit
    from nanovlm.training.finetuning import train_model

    return run_and_exit(lambda: train_model(args))


def export_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a Hub id (owner/name)")
    add("--out", required=True, metavar="FOLDER", help="where the files go")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the weights (float32)")


def export(args: argparse.Namespace) -> int:
    """Write a model as transformers' SmolVLM, the layout that transformers, vLLM and GGUF's converter read."""
    from nanovlm.cli.export import export_model

    return export_model(args)


def compile_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default=EMBEDDED, metavar="MODEL", help="a folder or a Hub id (the embedded model)")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--quantize", choices=("int8",), help="for a language model with weights of 8 bits")
    parser.set_defaults(device="cpu", compile=True, max_tiles=None, upscale=True)


def compile(args: argparse.Namespace) -> int:
    """Compile a model's decode step for this machine, once; single pictures are then captioned faster."""
    from nanovlm.cli.compile import compile_model

    return compile_model(args)


VERBS = {  # what it does, its flags, and an example
    "caption": (caption, caption_flags, "nanovlm caption photos --out photos/metadata.jsonl"),
    "chat": (chat, chat_flags, "nanovlm chat photo.jpg"),
    "serve": (serve, serve_flags, "nanovlm serve --port 8000"),
    "train": (train, train_flags, "nanovlm train --data photos --out out/mine"),
    "compile": (compile, compile_flags, "nanovlm compile out/mine --quantize int8"),
    "export": (export, export_flags, "nanovlm export out/mine --out out/smolvlm"),
}
