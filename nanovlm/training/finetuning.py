"""Fine-tune a model on the user's own images and texts, with evaluation on held-out examples."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from models.checkpoint import WEIGHTS, atomic_write, checkpoint_dtype, load_config, snapshot_path
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm import EMBEDDED
from nanovlm.captioner import Captioner
from nanovlm.data import Batches, Mixture, ReadOptions, Source, Stream, Subset, open_source, split
from nanovlm.data.examples import ExampleError
from nanovlm.data.validate import check_data
from nanovlm.device import choose_device
from nanovlm.errors import ImageError, InputError, NanoVLMError, TrainingError, UsageError
from nanovlm.evaluation import EvaluationOptions, evaluate, load_metric
from nanovlm.evaluation.evaluate import Question, QuestionList, example_questions
from nanovlm.evaluation.metrics import default_metrics
from nanovlm.hub import upload_checkpoint
from nanovlm.processing.convert import check_format, convert_layout
from nanovlm.processing.image_loading import load_image
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from nanovlm.synthetic.recipe import scene_source
from nanovlm.training.best import LOSS
from nanovlm.training.checkpointing import BaseModel, checkpoint_paths, stored_settings, write_errors, write_model
from nanovlm.training.config import TrainConfig
from nanovlm.training.loop import Run, TrainingTask, run_training
from nanovlm.training.probe import RunEstimate, estimate_run, memory_errors
from nanovlm.training.quantized_base import quantize_base

REFERENCE_HIDDEN_DIM = 192  # lm_hidden_dim of the embedded model, for which the default learning rates were tuned
MAX_CAPTIONED_IMAGES = 8  # held-out images that are captioned at each evaluation
MAX_CAPTION_TOKENS = 64
RUN_FILE = "run.yaml"

BASE = "base"  # folder of the model that a LoRA run started from, if it is in no other

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinetuneOptions:
    """Which model to fine-tune, on which examples, and where the result goes."""

    data: Sequence[str]  # files, folders and Hub ids, each with an optional share of the examples: PATH@0.3
    folder: Path
    model: str = str(EMBEDDED)  # a folder or a Hub id
    revision: str | None = None
    backbones: tuple[str, str] | None = None  # start from a SigLIP and a Llama instead of a model
    format: str | None = None  # nanovlm or smolvlm: the layout to train in; None keeps the model's
    device: str = "auto"
    read: ReadOptions = field(default_factory=ReadOptions)
    validation: float | None = None  # examples to hold out: a share below 1, or a number; None as `split` says
    evaluation_flags: Sequence[str] = ()  # that were given, and have no effect unless examples are held out
    metrics: Sequence[str] = ()  # of answers to held-out questions, see load_metric; () is all that are installed
    epochs: float | None = None  # how often each example is shown, instead of cfg.max_steps
    push_to_hub: str | None = None  # a Hub id to which every saved model is uploaded; a new one is private
    run_file: str | None = None  # the text of folder/run.yaml, from which the command line repeats the run
    quantize: str | None = None  # with cfg.lora_rank: one of BASE_FORMATS, in which the frozen weights are stored
    scale_lr: bool = False  # multiply cfg.lr by REFERENCE_HIDDEN_DIM / lm_hidden_dim


def fine_tune(options: FinetuneOptions, cfg: TrainConfig) -> VisionLanguageModel:
    """Train options.model on options.data, write it to options.folder and return it; see Trainer.run.

    If the folder holds checkpoints, training is resumed from the newest.
    """
    return _fine_tune(options, cfg, options.folder, run_training)


def estimate_finetuning(options: FinetuneOptions, cfg: TrainConfig) -> RunEstimate:
    """What `fine_tune` needs with these arguments; leaves nothing on disk."""
    options, training, held_out = open_examples(options)
    mixture = Mixture(training, cfg.seed)
    steps = cfg.max_steps if options.epochs is None else steps_of_epochs(options.epochs, mixture, cfg)
    logger.info(describe_data(mixture, held_out, replace(cfg, max_steps=steps), options.validation))
    return estimate_run(partial(_fine_tune, options, cfg))


def _fine_tune(options: FinetuneOptions, cfg: TrainConfig, folder: Path, run: Run) -> Any:
    """run(model, task, cfg) with the model and the data of the options, whose folder is replaced."""
    options = replace(options, folder=folder)
    check_folder(folder, options.data)
    model, task, cfg = prepare(options, cfg)
    if cfg.lora_rank and starts_anew(options) and os.environ.get("RANK", "0") == "0":
        with write_errors(folder):  # without its base model an adapter is of no use
            model.save_pretrained(folder / BASE, tokenizer=task.tokenizer)
    if options.quantize is not None:
        start = base_model(options)
        quantize_base(model, options.quantize, snapshot_path(start.name, start.revision))
    model.to(choose_device(options.device))
    if options.run_file is not None:
        write_run_file(folder, options.run_file)
    with data_errors(), memory_errors():
        return run(model, task, cfg)


def write_run_file(folder: Path, text: str) -> None:
    """Write folder/run.yaml, from which the command line repeats the run; only the main process does."""
    if os.environ.get("RANK", "0") == "0":
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / RUN_FILE) as new:
                new.write_text(text, encoding="utf-8")


def check_examples(options: FinetuneOptions) -> int:
    """Read all examples and print counts, errors and samples; 1 if some are unusable and not to be skipped."""
    options, training, held_out = open_examples(options)
    _, processor, _ = load_start(options)
    return check_data(training, held_out, processor, skip_errors=options.read.skip_errors)


def prepare(options: FinetuneOptions, cfg: TrainConfig) -> tuple[VisionLanguageModel, TrainingTask, TrainConfig]:
    """The model, its task, and cfg adapted to the width of the model and to the number of held-out examples."""
    options, training, held_out = open_examples(options)
    model, processor, dtype = load_start(options)
    if options.scale_lr:  # the wider a model, the lower its learning rate, in proportion (Yang et al. 2022)
        cfg = replace(cfg, lr=cfg.lr * REFERENCE_HIDDEN_DIM / processor.cfg.lm_hidden_dim)
    mixture, skip = Mixture(training, cfg.seed), options.read.skip_errors
    if options.epochs is not None:
        cfg = replace(cfg, max_steps=steps_of_epochs(options.epochs, mixture, cfg))
    n_parts = 1
    if any(isinstance(subset.source, Stream) for subset in training):  # each process that prepares batches reads a part
        n_parts = world_size() * max(1, cfg.num_workers)
    evaluation: dict[str, Any] = {}
    if held_out:
        unseen = Mixture(held_out, cfg.seed)
        # the size of a stream is unknown; this many examples are read of it
        n = sum(map(len, held_out)) or cfg.batch_size * cfg.validation_batches
        size = min(cfg.batch_size, n)
        cfg = replace(cfg, validation_batches=max(1, min(cfg.validation_batches, n // size)))
        # packed as the training batches are: padded ones might need more memory
        evaluation["validation"] = Batches(unseen, processor, size, skip, cfg.pack)
        questions = first_questions(unseen, min(MAX_CAPTIONED_IMAGES, n))
        evaluation["caption_images"] = partial(caption_images, questions, processor)
        evaluation["score_answers"] = answer_scorer(unseen, n, processor, options, cfg)
    task = TrainingTask(
        Batches(mixture, processor, cfg.batch_size, skip, cfg.pack, cfg.augment, n_parts),
        processor.tokenizer.to_json(),
        options.folder,
        save_dtype=dtype,
        data_fingerprint=fingerprint(training, n_parts),
        n_held_out=sum(map(len, held_out)) if options.validation is None else options.validation,
        write_model=partial(write_model, home=str(options.folder.resolve()), base=base_model(options)),
        base=base_model(options),
        after_save=partial(push_to_hub, options.push_to_hub) if options.push_to_hub else None,
        **evaluation,
    )
    if os.environ.get("RANK", "0") == "0":
        logger.info(describe_data(mixture, held_out, cfg, options.validation))
    return model, task, cfg


def starts_anew(options: FinetuneOptions) -> bool:
    """Whether training starts from a model that no folder holds: joined backbones, or one in another layout."""
    return options.backbones is not None or options.format == "smolvlm"


def base_model(options: FinetuneOptions) -> BaseModel:
    """The model to start from, a folder by its full path."""
    if starts_anew(options):
        return BaseModel(str((options.folder / BASE).resolve()))
    folder = Path(options.model)
    return BaseModel(str(folder.resolve()) if folder.is_dir() else options.model, options.revision)


# -------------------------------------------------------------------------------------------------------------- data


def open_examples(options: FinetuneOptions) -> tuple[FinetuneOptions, list[Subset], list[Subset]]:
    """The training examples and the held-out examples of each source, and the options.

    If these do not say what to hold out, they get the validation of the run that they resume. UsageError for flags that
    have no effect because nothing is held out.
    """
    if options.validation is None and (settings := stored_settings(options.folder)) is not None:
        options = replace(options, validation=settings.get("validation", 0))  # earlier versions held out nothing
    training, held_out = open_data(options.data, options.read, options.validation)
    if options.evaluation_flags and not held_out:
        flag = options.evaluation_flags[0]
        raise UsageError(f"{flag} has no effect without --validation: nothing of these data is held out by default")
    return options, training, held_out


def open_data(data: Sequence[str], read: ReadOptions, validation: float | None) -> tuple[list[Subset], list[Subset]]:
    """The training examples and the held-out examples of each source, see FinetuneOptions and `split`."""
    sources = []
    for text in data:
        path, share = parse_data(text)
        sources.append((open_source(path, read, generators={"scenes": scene_source}), share))
    check_supported(read, [source for source, _ in sources])
    return split(sources, validation)


def parse_data(text: str) -> tuple[str, float | None]:
    """PATH@SHARE as its two parts; a path that contains an @ and exists is a path without a share."""
    path, separator, share = text.rpartition("@")
    if not separator or os.path.exists(text):
        return text, None
    try:
        weight = float(share)
    except ValueError:
        raise UsageError(f"--data {text}: no such file or folder, and {share!r} is no share like 0.3") from None
    if not 0 < weight < math.inf:
        raise UsageError(f"--data {text}: a share must be above 0")
    return path, weight


def check_supported(read: ReadOptions, sources: Sequence[Source | Stream]) -> None:
    """UsageError if an option was set that has no effect on any of the sources."""
    defaults = ReadOptions()
    for f in fields(ReadOptions):
        is_set = f.name != "skip_errors" and getattr(read, f.name) != getattr(
            defaults, f.name
        )  # which is for every source
        if is_set and not any(f.name in source.supported_options for source in sources):
            flag = {"min_ratings": "--min-rating"}.get(f.name, f"--{f.name.replace('_', '-')}")
            paths = ", ".join(source.path for source in sources)
            raise UsageError(f"{flag} has no effect on {paths}; omit it")


def check_folder(folder: Path, data: Sequence[str]) -> None:
    """UsageError for a folder to which a model cannot be written without overwriting something else."""
    if folder.is_file():
        raise UsageError(f"--out {folder} is a file; name a folder for the model")
    if (folder / WEIGHTS).exists() and not checkpoint_paths(folder):
        raise UsageError(f"--out {folder} holds a model but no checkpoints to resume from; name another folder")
    if folder.resolve() in [Path(parse_data(text)[0]).resolve() for text in data]:
        raise UsageError(f"--out {folder} holds the data; name another folder for the model")


def world_size() -> int:
    """The number of training processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def fingerprint(training: Sequence[Subset], n_parts: int = 1) -> str:
    """Identify the examples by each source's path, share, number of examples and a digest of their fingerprints.

    The order of a stream depends on the number of parts in which it is read, so that one belongs to it.
    """
    parts = []
    for subset in training:
        part = subset.source.path if subset.weight is None else f"{subset.source.path}@{subset.weight:g}"
        if isinstance(subset.source, Source) and not subset.source.endless:
            digest = blake2b(digest_size=4)
            for index in subset.indices:
                digest.update(subset.source.fingerprint(index).encode("utf-8", "surrogatepass") + b"\0")
            part += f" ({len(subset)}, {digest.hexdigest()})"
        if isinstance(subset.source, Stream) and n_parts > 1:
            part += f" (in {n_parts} parts)"
        parts.append(part)
    return "; ".join(parts)


def steps_of_epochs(epochs: float, mixture: Mixture, cfg: TrainConfig) -> int:
    """Optimizer steps after which every example has been shown `epochs` times; sources without an end do not count."""
    sizes = [0 if group[0].source.endless else sum(map(len, group)) for group in mixture.groups]
    positions = max(size / share for size, share in zip(sizes, mixture.shares))
    if not positions:
        raise UsageError("--epochs needs data whose size is known, which a stream's or scenes' is not; use --max-steps")
    per_step = cfg.batch_size * cfg.gradient_accumulation_steps * world_size()
    return max(1, math.ceil(round(epochs * positions / per_step, 6)))


def describe_data(mixture: Mixture, held_out: Sequence[Subset], cfg: TrainConfig, validation: float | None) -> str:
    """One line: how many examples each source has, how often each is shown, and how many are held out."""
    batches = cfg.max_steps * cfg.gradient_accumulation_steps * world_size()
    parts = []
    for subsets, share in zip(mixture.groups, mixture.shares):
        paths, shown = ", ".join(subset.source.path for subset in subsets), share * batches * cfg.batch_size
        if subsets[0].source.endless:
            parts.append(f"{paths}: {shown:,.0f} examples are shown")
        else:
            total = sum(map(len, subsets))
            parts.append(f"{paths}: {total:,} examples, each shown {shown / total:.1f} times")
    if held_out:
        hint = " (--validation N holds out N, 0 none)" if validation is None else ""
        parts.append(f"{sum(map(len, held_out)):,} held out{hint}")
    elif validation is None:
        sources = [subset.source for group in mixture.groups for subset in group]
        if any(isinstance(source, Stream) for source in sources):
            parts.append("nothing held out (--validation 0.05 holds out 5%)")
        elif not all(source.endless for source in sources):
            parts.append("nothing held out (--validation N holds out N)")
    return "; ".join(parts)


def load_start(options: FinetuneOptions) -> tuple[VisionLanguageModel, Processor, torch.dtype]:
    """The model to start from, on the CPU, its processor, and the dtype to save it in.

    A model that will be quantized has the dtype of its files, which takes less memory than float32.
    """
    choose_device(options.device)  # raises for one that is not here, before anything is loaded
    if options.backbones:
        with torch.random.fork_rng():  # the projector and the rows of new tokens are the same at every start
            torch.manual_seed(0)
            captioner = Captioner.from_backbones(*options.backbones, format=options.format or "nanovlm")
        return captioner.model, captioner.processor, torch.float32
    folder = snapshot_path(options.model, options.revision)
    cfg = load_config(folder)
    if options.format:
        check_format(cfg, options.format)
    tokenizer = Tokenizer.from_pretrained(folder, cfg)
    stored = checkpoint_dtype(folder)
    dtype = stored if options.quantize and not options.format else torch.float32
    model, processor = load_model(folder, cfg, tokenizer.image_token_id, dtype), Processor(cfg, tokenizer)
    if options.format == "smolvlm":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, processor = convert_layout(model, tokenizer)
    return model, processor, stored


# ------------------------------------------------------------------------------------------- captions at evaluations


def first_questions(held_out: Mixture, n: int) -> list[tuple[list[Image.Image], str]]:
    """Images and first question of those of the first n examples that have images and can be read."""
    questions = []
    for position in range(n):
        try:
            example = held_out.example(position)
            images = [load_image(image) for image in example.images]
        except (ExampleError, ImageError):
            continue
        if images and example.qa_pairs:
            questions.append((images, example.qa_pairs[0][0]))
    return questions


def caption_images(
    questions: Sequence[tuple[list[Image.Image], str]], processor: Processor, model: VisionLanguageModel
) -> list[tuple[Image.Image, str]]:
    """The first image of each question, and the model's answer."""
    captioner, captions = Captioner(model, processor), []
    for images, question in questions:
        try:
            caption = captioner.caption(images, question, max_new_tokens=MAX_CAPTION_TOKENS)
        except NanoVLMError as error:  # a long question may leave no room for an answer; training goes on
            caption = f"({error})"
        captions.append((images[0], caption))
    return captions


def answer_scorer(
    held_out: Mixture, n: int, processor: Processor, options: FinetuneOptions, cfg: TrainConfig
) -> Callable[[VisionLanguageModel], Mapping[str, float]] | None:
    """A function that scores a model's answers to the first cfg.validation_questions of n held-out examples.

    UsageError if cfg.best_by is not among the metrics.
    """
    try:
        metrics = dict(load_metric(name) for name in options.metrics) or default_metrics()
    except InputError as error:
        raise UsageError(f"--metric: {error}") from None
    names = [LOSS, *(metrics if cfg.validation_questions else ())]
    if cfg.best_by not in names:
        raise UsageError(f"--best-by {cfg.best_by} is none of {', '.join(names)}")
    if not cfg.validation_questions:
        return None
    questions: list[Question] = []
    for position in range(n):
        if len(questions) < cfg.validation_questions:
            with suppress(ExampleError):
                questions += example_questions(held_out.example(position), "held out")
    asked = QuestionList(questions[: cfg.validation_questions])
    how = EvaluationOptions(metrics, max_new_tokens=MAX_CAPTION_TOKENS, skip_errors=True, show_progress=False)
    return partial(score_answers, asked, how, processor)


def score_answers(
    asked: QuestionList, how: EvaluationOptions, processor: Processor, model: VisionLanguageModel
) -> Mapping[str, float]:
    """The mean of each metric over the model's answers; {} if no question could be asked."""
    return evaluate(Captioner(model, processor), asked, how).scores


def push_to_hub(repo_id: str, folder: Path) -> None:
    """Upload the model in folder to the Hub; if that fails, a warning says so, and the next save tries again."""
    try:
        url = upload_checkpoint(folder, repo_id, private=True)
    except Exception as error:  # huggingface_hub raises errors of many kinds, from DNS to a missing token
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning(f"{folder} was not uploaded to {repo_id}: {reason}")
    else:
        logger.info(f"uploaded {folder}: {url}")


@contextmanager
def data_errors() -> Iterator[None]:
    """Turn an example that cannot be used into a TrainingError that says how to go on without it."""
    try:
        yield
    except ExampleError as error:
        raise TrainingError(
            f"{error}; --on-error skip goes on without it, --check-data lists all unusable examples"
        ) from error
