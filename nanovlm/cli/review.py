"""`nanovlm review`: a page on this machine to look at captions beside the pictures, and to change them."""

import argparse
import os
import webbrowser
from typing import TYPE_CHECKING

from nanovlm.cli.caption import checked_extension, model_label
from nanovlm.cli.options import MODEL_FLAGS, add_record_flags, from_args, load_captioner, model_options
from nanovlm.errors import UsageError, needs_extra
from nanovlm.options import CaptionOptions, GenerationOptions, ModelOptions
from nanovlm.serving.options import ServeOptions

if TYPE_CHECKING:
    from nanovlm.captioner import Captioner

HELP = "Review captions beside their pictures: edit, find and replace, caption again."
EXAMPLE = "nanovlm review photos"


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = "a folder of images with text files beside them, or a .jsonl table"
    parser.add_argument("target", metavar="FOLDER_OR_TABLE", help=text)
    add = parser.add_argument
    add("--extension", metavar="EXT", default=".txt", help="of the files beside images (default: .txt)")
    add("--port", type=int, default=0, metavar="N", help="port to listen on, of this machine only (default: any free)")
    add("--no-browser", action="store_true", help="print the address, and open no browser")
    answers = parser.add_argument_group("captions again")
    add_record_flags(answers, GenerationOptions, ("temperature", "seed", "max_new_tokens", "repetition_penalty"))
    add_record_flags(answers, ModelOptions, MODEL_FLAGS)


def run(args: argparse.Namespace) -> int:
    model = model_options(args)
    has_model = args.model is not None or args.adapter is not None
    extension = checked_extension(args.extension)
    if not os.path.isdir(args.target) and not (args.target.endswith(".jsonl") and os.path.lexists(args.target)):
        raise UsageError(f"{args.target} is neither a folder nor a .jsonl table; name one that exists")
    with needs_extra("serve", "review"):
        from nanovlm.review.app import Review, serve_review
        from nanovlm.serving.web import listen

    def load() -> "Captioner":
        return load_captioner(model, images=[args.target])

    options = from_args(CaptionOptions, args, **({"prompts": (model.prompt,)} if has_model else {}))
    listening = ServeOptions(port=args.port)
    review = Review(args.target, extension, load if has_model else None, options, model_label(model))
    with listen(listening) as listening_socket:
        serve_review(review, listening_socket, (lambda address: None) if args.no_browser else webbrowser.open)
    return 0
