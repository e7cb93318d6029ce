"""The verb `train`: flags in, a model's folder out, from a recipe or from somebody's own pictures."""

import argparse
import math
import os
import re
from dataclasses import fields, replace
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from models.checkpoint import WEIGHTS, checkpoint_dtype, load_config, load_model, snapshot_path
from models.vision_language_model import VisionLanguageModel
from nanovlm import EMBEDDED, PROMPT
from nanovlm.captioner import Captioner
from nanovlm.console import print_error
from nanovlm.data import Batches, Mixture, ReadOptions, Source, Stream, Subset, open_source, split
from nanovlm.data.examples import ExampleError
from nanovlm.data.validate import check_data
from nanovlm.device import choose_device
from nanovlm.errors import CheckpointError, DataError, ImageError, TrainingError, UsageError
from nanovlm.image_processing import load_image
from nanovlm.processor import Processor
from nanovlm.synthetic import recipe
from nanovlm.tokenizer import Tokenizer
from nanovlm.training.checkpointing import checkpoints
from nanovlm.training.config import ADAPTERS, FINETUNING, SCENES, TrainConfig
from nanovlm.training.loop import progress, train

OF_DATA = (
    "model", "revision", "prompt", "images", "text_column", "prompt_column", "min_rating", "stream", "validation",
    "on_bad_example", "check_data",
)  # fmt: skip
WIDTH = 192  # lm_hidden_dim of the embedded model, for which the usual learning rates are good
SHOWN = 8  # held-out pictures that are captioned as training goes on


def train_model(args: argparse.Namespace) -> int:
    """Train as args say; 1 if it stopped on the way."""
    try:
        cfg = settings(args)
        if args.recipe:
            model, processor = recipe.make_model(cfg.seed)
            batches = recipe.batches(processor, batch_size=cfg.batch_size, seed=cfg.seed, pack=cfg.pack)
            model = model.to(choose_device(args.device))
            train(model, processor.tokenizer.to_json(), batches, cfg, args.out, recipe.CHECKPOINT_DTYPE)
            return 0
        sources = [
            (open_source(path, reading(args), generators={"scenes": recipe.scene_source}), share)
            for path, share in map(path_and_share, args.data)
        ]
        check_obeyed(args, [source for source, _ in sources])
        learned, held = split(sources, args.validation or 0)
        if args.check_data:
            return check_data(learned, held, read_processor(args)[1], skip_errors=args.on_bad_example == "skip")
        return fine_tune(args, cfg, learned, held)
    except ExampleError as error:
        print_error(
            f"training stopped: {last_line(error)}; --on-bad-example skip goes on without it, --check-data lists all "
            "that are like it"
        )
    except (TrainingError, OSError) as error:
        print_error(f"training stopped: {last_line(error)}")
    except (CheckpointError, DataError, ValueError) as error:
        raise UsageError(last_line(error)) from None
    except (MemoryError, RuntimeError) as error:
        if not (way := more_room(error)):
            raise
        print_error(f"training stopped: {way}")
    return 1


def settings(args: argparse.Namespace) -> TrainConfig:
    """The training's settings; refuses flags that contradict each other, before any work."""
    given = {f.name: getattr(args, f.name) for f in fields(TrainConfig) if getattr(args, f.name) is not None}
    usual = SCENES if args.recipe else ADAPTERS if args.lora_rank else FINETUNING
    cfg = replace(usual, **given)
    if args.recipe:
        for name in OF_DATA:
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} belongs to --data; --recipe scenes draws its own pictures"
                )
    for name, meant, way in (
        ("lora_alpha", cfg.lora_rank, "without --lora-rank"),
        ("lora_words", cfg.lora_rank, "without --lora-rank"),
        ("lora_rank", not args.recipe, "with --recipe, which begins from nothing"),
        ("augment", not args.recipe, "with --recipe, which shows nothing again"),
        ("decay", cfg.schedule == "trapezoid", "with --schedule cosine"),
        ("validate_every", args.validation, "without --validation"),
        ("validation_batches", args.validation, "without --validation"),
        ("fsdp", not cfg.fsdp or "WORLD_SIZE" in os.environ or cfg.plan, "for one process, without torchrun"),
    ):
        if name in given and not meant:
            raise UsageError(f"--{name.replace('_', '-')} means nothing {way}; leave it away")
    if args.check_data and cfg.plan:
        raise UsageError("--check-data and --plan answer two questions; ask one after the other")
    if not (args.out or args.check_data or cfg.plan):
        raise UsageError("--out is required: the folder where the model goes")
    if args.out:
        check_free(Path(args.out), args.data or ())
    if cfg.tensorboard and find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs tensorboard: pip install 'nanovlm[tensorboard]'")
    n = args.validation or 0
    if not (0 <= n < 1 or (n >= 1 and n.is_integer())):
        raise UsageError(f"--validation {n:g} is neither a share below 1 nor a number of examples")
    return cfg


def check_free(folder: Path, data: list[str]) -> None:
    """Refuse a folder that no model can go to without a loss."""
    if folder.is_file():
        raise UsageError(f"--out {folder} is a file; name a folder, where the model goes")
    if (folder / WEIGHTS).exists() and not checkpoints(folder):
        raise UsageError(f"--out {folder} holds a model but no checkpoints to go on from; name another folder")
    if folder.resolve() in [Path(path_and_share(text)[0]).resolve() for text in data]:
        raise UsageError(f"--out {folder} holds the data; name a folder of its own, where the model goes")


def path_and_share(text: str) -> tuple[str, float | None]:
    """PATH@SHARE in its two parts; a path that holds an @ and exists is a path."""
    path, at, share = text.rpartition("@")
    if not at or os.path.exists(text):
        return text, None
    try:
        weight = float(share)
    except ValueError:
        raise UsageError(f"--data {text}: no such file or folder, and {share!r} is no share like 0.3") from None
    if not 0 < weight < math.inf:
        raise UsageError(f"--data {text}: a share must be above 0")
    return path, weight


def reading(args: argparse.Namespace) -> ReadOptions:
    ratings = {}
    for text in args.min_rating or ():
        name, _, least = text.partition("=")
        try:
            ratings[name] = float(least)
        except ValueError:
            raise UsageError(f"--min-rating {text}: write a rating's name and a number, as formatting=3") from None
    return ReadOptions(
        prompt=PROMPT if args.prompt is None else args.prompt,
        images=args.images,
        text_column=args.text_column,
        prompt_column=args.prompt_column,
        min_ratings=ratings,
        stream=bool(args.stream),
        skip_errors=args.on_bad_example == "skip",
    )


def check_obeyed(args: argparse.Namespace, sources: list[Source | Stream]) -> None:
    """Refuse a flag that means nothing for any source."""
    for flag, name in {**{name: name for name in ReadOptions.__dataclass_fields__}, "min_rating": "min_ratings"}.items():
        if getattr(args, flag, None) is not None and not any(name in source.supported_options for source in sources):
            paths = ", ".join(source.path for source in sources)
            raise UsageError(f"--{flag.replace('_', '-')} means nothing for {paths}; leave it away")


def read_processor(args: argparse.Namespace) -> tuple[Path, Processor]:
    """The folder of the model to begin with, and its processor."""
    folder = snapshot_path(args.model or EMBEDDED, args.revision)
    cfg = load_config(folder)
    return folder, Processor(cfg, Tokenizer.from_pretrained(folder, cfg))


def fine_tune(args: argparse.Namespace, cfg: TrainConfig, learned: list[Subset], held: list[Subset]) -> int:
    """Train args.model on the examples learned; those held out are looked at before, now and then, and after."""
    device = choose_device(args.device)
    folder, processor = read_processor(args)
    tokenizer, skip = processor.tokenizer, args.on_bad_example == "skip"
    if args.lr is None:  # the wider a model, the lower its rate, in proportion (Yang et al. 2022)
        cfg = replace(cfg, lr=cfg.lr * WIDTH / processor.cfg.lm_hidden_dim)
    mixture = Mixture(learned, cfg.seed)
    batches = Batches(mixture, processor, cfg.batch_size, skip, cfg.pack, cfg.augment)
    model = load_model(folder, processor.cfg, tokenizer.image_token_id, device=device)
    if os.environ.get("RANK", "0") == "0":
        progress(outlook(mixture, held, cfg))
    looks = {}
    if held:
        unseen = Mixture(held, cfg.seed)
        known = sum(map(len, held)) or cfg.batch_size * cfg.validation_batches  # of streams, nobody knows
        size = min(cfg.batch_size, known)
        cfg = replace(cfg, validation_batches=max(1, min(cfg.validation_batches, known // size)))
        looks["validation"] = Batches(unseen, processor, size, skip, cfg.pack)  # padded, they might need more memory
        looks["show"] = partial(captions, shown(unseen, min(SHOWN, known)), processor)
    train(model, tokenizer.to_json(), batches, cfg, args.out, checkpoint_dtype(folder), data=identity(learned), **looks)
    return 0


def identity(learned: list[Subset]) -> str:
    """What tells these examples from others: of each source its path, share, number of examples and a digest of them,
    see `Source.fingerprint`."""
    said = []
    for part in learned:
        share = "" if part.weight is None else f"@{part.weight:g}"
        traces = blake2b(digest_size=4)
        for number in part.indices if not part.source.endless else ():
            traces.update(part.source.fingerprint(number).encode("utf-8", "surrogatepass") + b"\0")
        said.append(f"{part.source.path}{share}" + f" ({len(part)}, {traces.hexdigest()})" * (not part.source.endless))
    return "; ".join(said)


def outlook(mixture: Mixture, held: list[Subset], cfg: TrainConfig) -> str:
    """What is going to be learned from, and how often, in one line."""
    said, examples = [], cfg.steps * cfg.accumulate * cfg.batch_size * int(os.environ.get("WORLD_SIZE", 1))
    for parts, share in zip(mixture.groups, mixture.shares):
        names, seen = ", ".join(part.source.path for part in parts), share * examples
        if not parts[0].source.endless:
            total = sum(map(len, parts))
            said.append(f"{names}: {total:,} examples, each shown {seen / total:.1f} times")
        else:
            said.append(f"{names}: {seen:,.0f} examples are shown")
    return "; ".join([*said, f"{sum(map(len, held)):,} held out"][: len(said) + bool(held)])


def shown(unseen: Mixture, n: int) -> list[tuple[list[Image.Image], str]]:
    """Pictures and first question of the first n examples that have a picture and can be read."""
    found = []
    for place in range(n):
        try:
            example = unseen.example(place)
            pictures = [load_image(picture) for picture in example.images]
        except (ExampleError, ImageError):
            continue
        if pictures and example.qa_pairs:
            found.append((pictures, example.qa_pairs[0][0]))
    return found


def captions(asked: list, processor: Processor, model: VisionLanguageModel) -> list[tuple[Image.Image, str]]:
    """What model says of each: its first picture, and the answer."""
    captioner, said = Captioner(model, processor), []
    for pictures, prompt in asked:
        try:
            said.append((pictures[0], captioner.caption(pictures, prompt, max_new_tokens=64)))
        except ValueError as error:  # a long question may leave no room; training goes on
            said.append((pictures[0], f"({error})"))
    return said


def more_room(error: Exception) -> str:
    """What helps if memory ran out, here or, which ends a process from outside, where batches are prepared; else ""."""
    if "DataLoader worker" in str(error):
        return f"{last_line(error)} Perhaps it lacked memory; --workers 0 does without it"
    if isinstance(error, MemoryError) or re.search("out of memory|memory: you tried to allocate", str(error)):
        return "not enough memory; lower --batch-size and raise --accumulate, or add --gradient-checkpointing (--plan)"
    return ""


def last_line(error: Exception) -> str:
    """What an error says; from a process that prepares batches it comes as a whole traceback, which ends in that."""
    line = (str(error).rstrip().splitlines() or [type(error).__name__])[-1]
    return re.sub(r"^[\w.]+Error: ", "", line)
