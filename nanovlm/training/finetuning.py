"""Fine-tune a model on the user's own images and texts, with evaluation on held-out examples; or draw the images."""

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import CONFIG, FORMATS, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, checkpoint_dtype, snapshot_path
from models.common import files
from models.lora.files import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from models.vision_language_model import VisionLanguageModel
from nanovlm.captioner import Captioner
from nanovlm.console import count
from nanovlm.data import ExampleBatches, ExampleError, Mixture, Source, StreamedSource, check_data, open_data
from nanovlm.data.examples import questions as questions_about
from nanovlm.data.mixture import parse_validation, source_lines
from nanovlm.device import choose_device
from nanovlm.embedded import SETTINGS
from nanovlm.errors import TrainingError, UsageError, is_out_of_memory
from nanovlm.evaluation import Evaluation, EvaluationOptions, evaluate, load_metric
from nanovlm.options import check_output_folder, parse_data
from nanovlm.processing.processor import Processor
from nanovlm.training.checkpointing import STATE, checkpoint_path, checkpoint_steps, stored_settings, write_errors
from nanovlm.training.config import RUN_FILE, FinetuneOptions, TrainConfig, choose_settings, read_run
from nanovlm.training.distributed import is_main, world_size
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.metrics import LOSS, METRICS_FILE, REPORT, check_installed

DIGESTED = 256  # weights at either end of a tensor, of which a digest is made
BASE = "base"  # folder of the model that a LoRA run started from, if it is in no other
WRITTEN = (  # to the folder of a run, beside checkpoints and the files of some formats
    CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, SETTINGS, ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, RUN_FILE,
    METRICS_FILE, REPORT,
)  # fmt: skip

logger = logging.getLogger(__name__)


def fine_tune(options: FinetuneOptions, cfg: TrainConfig) -> VisionLanguageModel:
    """Train options.model on options.data, or a new one on drawn scenes, to options.out; see `Trainer.run`."""
    with remedies():
        return start(options, cfg).run()


@contextmanager
def remedies() -> Iterator[None]:
    """Turn an unusable example, or running out of memory, into a TrainingError that says what helps."""
    try:
        yield
    except ExampleError as error:
        raise TrainingError(
            f"{error}; --on-error skip goes on without it, --check-data lists all unusable examples"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if "DataLoader worker (pid" in str(error):  # killed, or exited
            line = str(error).strip().splitlines()[-1]
            raise TrainingError(f"{line}; memory may have run out: --num-workers 0 needs less") from error
        if is_out_of_memory(error):
            remedy = "lower --batch-size and raise --gradient-accumulation-steps"
            raise TrainingError(f"not enough memory; {remedy}") from error
        raise


def check_examples(options: FinetuneOptions) -> int:
    """Read all examples and print counts, errors and samples; 1 if some are unusable and not to be skipped."""
    options = resumed_options(options)
    training, held_out = open_data(options.data, options.read, options.validation, check=True)
    _, processor, _ = load_start(options)
    return check_data(training, held_out, processor, skip_errors=options.read.skip_errors)


def start(options: FinetuneOptions, cfg: TrainConfig) -> Trainer:
    """The run with the model and the data of the options, or with drawn scenes."""
    check_installed(cfg)
    check_folder(options.out, options.data)
    model, task, cfg = (prepare if options.data else prepare_scenes)(options, cfg)
    if cfg.lora_rank and options.backbones and is_main():
        with write_errors(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
            with files.locked(options.out):  # without its base an adapter is of no use
                model.save_pretrained(options.out / BASE, tokenizer=task.tokenizer)
    model.to(choose_device(options.device))
    run = Trainer(model, task, cfg)
    if options.flags is not None and is_main():  # for --config, and for who asks what a model was trained on
        chosen = [name for name in options.automatic if name != "max_steps" or options.epochs is None]
        settings = {**options.flags, **{name: getattr(cfg, name) for name in chosen}}
        if options.data:
            settings |= {"data": list(map(absolute, options.data)), "validation": task.n_held_out}
            settings.pop("model", None)
            settings.pop("backbones", None)
            settings |= run.origin
        if options.read.images:
            settings["images"] = os.path.abspath(options.read.images)
        if run.step < cfg.max_steps or not (options.out / RUN_FILE).exists():  # of a finished run nothing changes
            with write_errors(options.out):
                files.replace(options.out / RUN_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return run


def check_folder(folder: Path, data: Sequence[str | os.PathLike[str]]) -> None:
    """UsageError or InputError for a folder to which a model cannot be written, or only over something else."""
    check_output_folder(folder)
    if link := next((path for path in (folder / "checkpoints", folder / BASE) if path.is_symlink()), None):
        raise UsageError(f"--out {folder}: {link} is a link; remove it, or name another folder")
    names = {*WRITTEN, *(name for find in FORMATS.values() for name in find().other_files), *[BASE] * is_main()}
    if (found := sorted(name for name in names if os.path.lexists(folder / name))) and not holds_run(folder):
        raise UsageError(f"--out {folder} holds {found[0]}, but no run to resume; move it away, or name another folder")
    if folder.resolve() in [Path(parse_data(text)[0]).resolve() for text in data]:
        raise UsageError(f"--out {folder} holds the data; name another folder for the model")


def holds_run(folder: Path) -> bool:
    """Check for a checkpoint, or for the run.json of a run that ended before its first one."""
    if any((checkpoint_path(folder, step) / STATE).exists() for step in checkpoint_steps(folder)):
        return True
    settings = {} if (folder / WEIGHTS).exists() else read_run(folder)
    return "out" in settings and not settings.keys().isdisjoint({"data", "recipe"})


def prepare_scenes(options: FinetuneOptions, cfg: TrainConfig) -> tuple[VisionLanguageModel, TrainingTask, TrainConfig]:
    """The embedded model with random weights, and its task: drawn scenes."""
    from nanovlm.synthetic import recipe  # here: other data do without the drawer

    model, processor = recipe.make_model(cfg.seed)
    get_batch = recipe.SceneBatches(processor, cfg.batch_size, cfg.seed)
    tokenizer = processor.tokenizer.to_json()
    return model, TrainingTask(get_batch, tokenizer, options.out, save_dtype=recipe.CHECKPOINT_DTYPE), cfg


def prepare(options: FinetuneOptions, cfg: TrainConfig) -> tuple[VisionLanguageModel, TrainingTask, TrainConfig]:
    """Return the model, its task, and cfg with the settings that follow from model and data."""
    options = resumed_options(options)
    training, held_out = open_data(options.data, options.read, options.validation)
    if options.metric and not held_out:
        raise UsageError("--metric has no effect: nothing of these data is held out; add --validation N, or omit it")
    model, processor, dtype = load_start(options)
    mixture = Mixture(training, cfg.seed)
    width = processor.cfg.lm_hidden_dim
    steps = count_steps_per_epoch(mixture, cfg)
    run = stored_settings(options.out) or ({} if options.backbones else read_run(snapshot_path(options.model)))
    cfg, reasons = choose_settings(options, cfg, width, steps, trained_by=run.get("optimizer"))
    is_streamed = any(isinstance(one, StreamedSource) for one in training)
    n_parts = world_size() * max(1, cfg.num_workers) if is_streamed else 1  # one for each process that makes batches
    own, number = parse_validation(options.validation)
    n_held_out = sum(map(len, held_out)) if number is None else int(number) if number % 1 == 0 else number
    task = TrainingTask(
        ExampleBatches(mixture, processor, cfg.batch_size, options.read.skip_errors, cfg.pack, cfg.augment, n_parts),
        processor.tokenizer.to_json(),
        options.out,
        save_dtype=dtype,
        data_fingerprint=fingerprint(training, n_parts),
        n_held_out=os.path.abspath(own) if own else n_held_out,
        base=base_model(options),
        prompt=options.read.question,
        origin=origin(options),
        model_digest=digest(model),
        **(held_out_task(options, cfg, held_out, processor) if held_out else {}),
    )
    if is_main():
        logger.info(describe_data(mixture, held_out, cfg, options.validation is None))
        if reasons:
            logger.info(f"chosen: {'; '.join(reasons)}")
    return model, task, cfg


def held_out_task(
    options: FinetuneOptions, cfg: TrainConfig, held_out: Sequence[Source], processor: Processor
) -> dict[str, Any]:
    """The fields of a TrainingTask that score a model on held-out examples."""
    unseen = Mixture(held_out, cfg.seed)
    positions = range(sum(map(len, held_out)))
    picked = [unseen.pick(0, position) for position in positions]
    questions = questions_about((source.path, source[i]) for source, i in picked)
    metric = options.metric or (LOSS if options.backbones else "f1")
    names = dict.fromkeys((metric, "f1", "exact_match"))
    metrics = dict(load_metric(name) for name in names if name != LOSS)
    how = EvaluationOptions(metrics, skip_errors=True, show_progress=False)

    def answer(model: VisionLanguageModel, everything: bool) -> Evaluation:
        asked = questions if everything else questions[: cfg.validation_questions]
        return evaluate(Captioner(model, processor), asked, how)

    return {
        # packed as the training batches are: padded ones might need more memory
        "validation": ExampleBatches(
            unseen, processor, cfg.batch_size, options.read.skip_errors, cfg.pack, positions=positions
        ),
        "n_validation": math.ceil(len(positions) / cfg.batch_size),
        "answer_questions": answer,
        "metric": LOSS if metric == LOSS else next(iter(metrics)),
        "is_error_rate": metric.startswith("-"),
    }


def base_model(options: FinetuneOptions) -> str:
    """The model to start from, as adapters name it: a folder by its full path, or a Hub id."""
    folder = options.out / BASE if options.backbones else Path(options.model)
    return str(folder.resolve()) if options.backbones or folder.is_dir() else os.fspath(options.model)


def origin(options: FinetuneOptions) -> dict[str, Any]:
    """The flags that name what training starts from, folders by their full path; none for the embedded model."""
    if options.backbones:
        return {"backbones": list(map(absolute, options.backbones))}
    return {} if options.model == FinetuneOptions.model else {"model": base_model(options)}


def load_start(options: FinetuneOptions) -> tuple[VisionLanguageModel, Processor, torch.dtype]:
    """The model to start from, in float32 on the CPU, its processor, and the dtype to save it in."""
    choose_device(options.device)  # raises for one that is not here, before anything is loaded
    if options.backbones:
        vision, language = options.backbones
        with torch.random.fork_rng():  # the projector and the rows of new tokens are the same at every start
            torch.manual_seed(0)
            captioner = Captioner.from_backbones(vision, language)
        return captioner.model, captioner.processor, torch.float32
    folder = snapshot_path(options.model)
    captioner = Captioner.from_pretrained(folder, "cpu", "float32")
    return captioner.model, captioner.processor, checkpoint_dtype(folder)


def resumed_options(options: FinetuneOptions) -> FinetuneOptions:
    """Return the options, with the validation of the run that they resume unless they name one."""
    settings = stored_settings(options.out) if options.validation is None else None
    return options if settings is None else replace(options, validation=settings["validation"])


def absolute(data: str | os.PathLike[str]) -> str:
    """Name of data, with its share if any, as an absolute path, or as it is if it is no path."""
    path, _ = parse_data(data)
    return os.path.abspath(path) + os.fspath(data)[len(path) :] if os.path.exists(path) else os.fspath(data)


def fingerprint(training: Sequence[Source], n_parts: int = 1) -> str:
    """Text that changes with the data: names, shares, numbers and digests of examples; for a stream its parts."""
    names = []
    for source in training:
        share = "" if source.weight is None else f"@{source.weight:g}"
        if not source.endless:
            examples = blake2b("".join(source.digests).encode(), digest_size=4).hexdigest()
            names.append(f"{os.path.basename(absolute(source.path))}{share} ({len(source)}, {examples})")
        else:
            names.append(absolute(source.path) + share + (f" (in {n_parts} parts)" if n_parts > 1 else ""))
    return "; ".join(names)


def digest(model: VisionLanguageModel) -> str:
    """A digest of the ends of all weights, by which a model is known under another name."""
    ends = blake2b(digest_size=4)
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        ends.update(torch.cat((flat[:DIGESTED], flat[-DIGESTED:])).float().cpu().numpy().tobytes())
    return ends.hexdigest()


def examples_per_step(cfg: TrainConfig) -> int:
    """The number of examples of an optimizer step, over all processes."""
    return cfg.batch_size * cfg.gradient_accumulation_steps * world_size()


def count_steps_per_epoch(mixture: Mixture, cfg: TrainConfig) -> float:
    """Optimizer steps until every example was shown once, without endless sources; 0 if there are no others."""
    sizes = [0 if group[0].endless else sum(map(len, group)) for group in mixture.groups]
    return max(size / share for size, share in zip(sizes, mixture.shares)) / examples_per_step(cfg)


def describe_data(mixture: Mixture, held_out: Sequence[Source], cfg: TrainConfig, is_default: bool) -> str:
    """Lines that say what was read, how often each example is shown, and how many are held out."""
    n_shown = cfg.max_steps * examples_per_step(cfg)
    n_held_out = sum(map(len, held_out))
    training = [source for group in mixture.groups for source in group]
    parts = []
    for sources, share in zip(mixture.groups, mixture.shares):
        paths = ", ".join(source.path for source in sources)
        if sources[0].endless:
            parts.append(f"{paths}: {share * n_shown:,.0f} examples are shown")
        else:
            total = sum(map(len, sources))
            parts.append(f"{paths}: {count(total, 'example')}, each shown {share * n_shown / total:.1f} times")
    if n_held_out:
        parts.append(f"{n_held_out:,} held out" + (" (--validation N holds out N, 0 none)" if is_default else ""))
    elif is_default and any(isinstance(one, StreamedSource) or not one.endless for one in training):
        parts.append("nothing held out (--validation 0.05 holds out 5%)")
    return "\n".join([*source_lines(training, held_out), "; ".join(parts)])
