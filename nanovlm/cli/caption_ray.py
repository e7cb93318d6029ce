"""`nanovlm caption --ray`: captions of folders, tars and parquet files on a Ray cluster."""

import argparse
import re
from functools import partial

from nanovlm.bulk.options import OutputOptions
from nanovlm.bulk.ray_captioning import RayOptions, caption_on_ray, plan_on_ray
from nanovlm.cli.caption_files import MODEL_SETTINGS, bulk_options, print_plan, summary
from nanovlm.cli.options import EMBEDDED_NOTE, from_args, load_captioner, model_options
from nanovlm.console import print_error
from nanovlm.embedded import EMBEDDED
from nanovlm.errors import UsageError
from nanovlm.options import GenerationOptions, check_positive

ADDRESS = re.compile(r"auto|local|ray://.+|[^/\s]+:\d+")
NOT_HERE = ("json", "existing", "extension", "as_video")  # flags of one machine


def caption_ray(args: argparse.Namespace, generation: GenerationOptions) -> int:
    """Caption what args name into shards; 1 if an image failed, after the others are done."""
    check_ray_flags(args)
    model = model_options(args)
    ray_options = from_args(RayOptions, args, address=args.ray or None)
    selection = {"names_file": args.from_file, "recursive": args.recursive is not False, "limit": args.limit}
    if args.dry_run:
        return print_plan(plan_on_ray(args.images, ray_options, **selection))
    if model.model == EMBEDDED and model.adapter is None:
        print_error(EMBEDDED_NOTE)
    report = caption_on_ray(
        partial(load_captioner, model, args.prompts, generation.max_new_tokens),
        args.images,
        ray_options,
        bulk_options(args, generation),
        OutputOptions(prefix=args.prefix or "", suffix=args.suffix or ""),
        **selection,
        model_settings={name: getattr(model, name) for name in MODEL_SETTINGS},
    )
    print_error(summary(report, "skip"))
    return 1 if report.failed else 0


def check_ray_flags(args: argparse.Namespace) -> None:
    """Refuse flags and values that make no sense on a cluster, before any work."""
    if args.ray and not ADDRESS.fullmatch(args.ray):
        raise UsageError(f"--ray {args.ray} is no address like auto or ray://HOST:10001; name images before --ray")
    for flag in NOT_HERE:
        if getattr(args, flag) not in (None, False):
            raise UsageError(f"--{flag.replace('_', '-')} is for one machine; leave it or --ray away")
    check_positive({"--limit": args.limit})
    if args.out is None or args.out in ("txt", "-") or re.search(r"\.(jsonl|csv|parquet)$", args.out):
        given = "missing" if args.out is None else args.out
        raise UsageError(f"--out {given} with --ray must be a folder, or the URI of one, for the shards")
    if args.samples != 1 or len(args.prompts) > 1:
        raise UsageError("--ray gives each image one caption; leave out --samples, and run it once for each --prompt")
    if "-" in args.images or not (args.images or args.from_file):
        raise UsageError("--ray needs names of images, folders, tars or parquet files, or --from-file")
