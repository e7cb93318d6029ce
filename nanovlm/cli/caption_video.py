"""`nanovlm caption` of videos: files, and with --as-video animated images, folders and lists of frames."""

import argparse
import json
import sys

from nanovlm.cli.options import load_captioner, report_missing
from nanovlm.console import TileProgress, for_terminal, print_error
from nanovlm.errors import ImageError, UsageError
from nanovlm.options import GenerationOptions, ModelOptions, check_positive


def caption_videos(args: argparse.Namespace, generation: GenerationOptions, model: ModelOptions) -> int:
    """Print an answer for each prompt about each video; 1 if one failed, after the others are done."""
    if not args.images or args.samples != 1:
        raise UsageError("--as-video needs names of frames or videos, and goes without --samples")
    check_positive({"--max-frames": args.max_frames})
    if report_missing(args.images):
        return 1
    are_frames = args.as_video and len(args.images) > 1
    videos = [args.images] if are_frames else args.images
    captioner = load_captioner(model, args.prompts, generation.max_new_tokens, own_images=True)
    if not args.quiet:
        captioner.inference.on_tile = TileProgress()
    failed = 0
    for video in videos:
        name = video[0] if are_frames else video
        for prompt in args.prompts:
            try:
                text = captioner.caption_video(video, prompt, max_frames=args.max_frames, options=generation)
            except ImageError as error:
                print_error(str(error))
                failed += 1
                break
            if args.json:
                print(json.dumps({"video": name, "prompt": prompt, "text": text}), flush=True)
            else:
                line = f"{name}: " * (len(videos) > 1) + " ".join(text.splitlines())
                print(for_terminal(line, sys.stdout), flush=True)
    return 1 if failed else 0
