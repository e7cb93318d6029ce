"""Fine-tune a model on the user's own images and texts, with evaluation on held-out examples; or draw the images."""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import WEIGHTS, atomic_write, checkpoint_dtype, load_config, read_object, snapshot_path
from models.vision_language_model import VisionLanguageModel, load_model
from nanovlm.captioner import Captioner
from nanovlm.data import Batches, Mixture, Stream, check_data
from nanovlm.data.examples import questions as ask
from nanovlm.device import choose_device
from nanovlm.errors import TrainingError, UsageError, is_out_of_memory
from nanovlm.evaluation import METRICS, Evaluation, EvaluationOptions, evaluate, load_metric
from nanovlm.evaluation.evaluate import QuestionList
from nanovlm.evaluation.metrics import Metric
from nanovlm.options import check_output_folder
from nanovlm.processing.convert import check_format, convert_layout
from nanovlm.processing.processor import Processor
from nanovlm.processing.tokenizer import Tokenizer
from nanovlm.training.checkpointing import BaseModel, checkpoint_paths, stored_settings, write_errors, write_model
from nanovlm.training.config import FinetuneOptions, TrainConfig, choose
from nanovlm.training.distributed import training_lock
from nanovlm.training.examples import (
    count_steps_per_epoch,
    data_errors,
    describe_data,
    fingerprint,
    open_examples,
    parse_data,
    resumed_options,
    world_size,
)
from nanovlm.training.loop import Trainer, TrainingTask
from nanovlm.training.metrics import LOSS, check_installed

MAX_ANSWER_TOKENS = 64
RUN_FILE = "run.json"
BEST_METRIC = "f1"  # says which evaluation is the best, unless another is named

BASE = "base"  # folder of the model that a LoRA run started from, if it is in no other

logger = logging.getLogger(__name__)


def fine_tune(options: FinetuneOptions, cfg: TrainConfig) -> VisionLanguageModel:
    """Train options.model on options.data, write it to options.out and return it; see Trainer.run.

    Without data, the embedded model is trained from scratch on drawn scenes. If the folder holds checkpoints, training
    is resumed from the newest.
    """
    with data_errors(), memory_errors():
        return start(options, cfg).run()


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn running out of memory, here or in a data loader worker, into a TrainingError that says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if "DataLoader worker (pid" in str(error):  # killed, or exited
            line = str(error).strip().splitlines()[-1]
            raise TrainingError(f"{line}; memory may have run out: --num-workers 0 needs less") from error
        if is_out_of_memory(error):
            remedy = "lower --batch-size and raise --gradient-accumulation-steps, or add --gradient-checkpointing"
            raise TrainingError(f"not enough memory; {remedy}") from error
        raise


def check_examples(options: FinetuneOptions) -> int:
    """Read all examples and print counts, errors and samples; 1 if some are unusable and not to be skipped."""
    options = resumed_options(options)
    training, held_out = open_examples(options, check=True)
    _, processor, _ = load_start(options)
    return check_data(training, held_out, processor, skip_errors=options.read.skip_errors)


def start(options: FinetuneOptions, cfg: TrainConfig) -> Trainer:
    """The run with the model and the data of the options, or with drawn scenes."""
    check_installed(cfg)
    check_folder(options.out, options.data)
    model, task, cfg = prepare(options, cfg) if options.data else prepare_scenes(options, cfg)
    if cfg.lora_rank and starts_anew(options) and os.environ.get("RANK", "0") == "0":
        with write_errors(options.out), training_lock(options.out):  # without its base an adapter is of no use
            model.save_pretrained(options.out / BASE, tokenizer=task.tokenizer)
    model.to(choose_device(options.device))
    run = Trainer(model, task, cfg)
    write_run_file(options, cfg)
    return run


def write_run_file(options: FinetuneOptions, cfg: TrainConfig) -> None:
    """Write run.json, from which the command line repeats the run; only the main process does."""
    if options.flags is not None and os.environ.get("RANK", "0") == "0":
        chosen = [name for name in options.automatic if name != "max_steps" or options.epochs is None]
        flags = {**options.flags, **{name: getattr(cfg, name) for name in chosen}}
        with write_errors(options.out), atomic_write(options.out / RUN_FILE) as new:
            new.write_text(json.dumps(flags, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def prepare(options: FinetuneOptions, cfg: TrainConfig) -> tuple[VisionLanguageModel, TrainingTask, TrainConfig]:
    """The model, its task, and cfg adapted to the width of the model and to the number of held-out examples."""
    options = resumed_options(options)
    training, held_out = open_examples(options)
    model, processor, dtype = load_start(options)
    mixture, skip = Mixture(training, cfg.seed), options.read.skip_errors
    cfg, reasons = choose_settings(options, cfg, processor.cfg.lm_hidden_dim, mixture)
    n_parts = 1
    if any(isinstance(subset.source, Stream) for subset in training):  # each process that prepares batches reads a part
        n_parts = world_size() * max(1, cfg.num_workers)
    evaluation: dict[str, Any] = {}
    if held_out:
        unseen = Mixture(held_out, cfg.seed)
        positions = range(sum(map(len, held_out)))
        all_batches = math.ceil(len(positions) / cfg.batch_size)
        cfg = replace(cfg, validation_batches=min(cfg.validation_batches or all_batches, all_batches))
        # packed as the training batches are: padded ones might need more memory
        evaluation["validation"] = Batches(unseen, processor, cfg.batch_size, skip, cfg.pack, positions=positions)
        metrics = dict(load_metric(name) for name in options.metric if name != LOSS)
        by_loss = LOSS in options.metric[:1] or not cfg.validation_questions
        evaluation["best_metric"] = LOSS if by_loss else next(iter(metrics), BEST_METRIC)
        metrics = metrics or METRICS
        evaluation["answer_questions"], asked = answer_scorer(unseen, positions, processor, metrics, cfg)
        cfg = replace(cfg, validation_questions=asked)
    task = TrainingTask(
        Batches(mixture, processor, cfg.batch_size, skip, cfg.pack, cfg.augment, n_parts),
        processor.tokenizer.to_json(),
        options.out,
        save_dtype=dtype,
        data_fingerprint=fingerprint(training, n_parts),
        n_held_out=sum(map(len, held_out)) if options.validation is None else options.validation,  # type: ignore[arg-type]
        write_model=partial(write_model, home=str(options.out.resolve()), base=base_model(options)),
        **evaluation,
    )
    if os.environ.get("RANK", "0") == "0":
        logger.info(describe_data(mixture, held_out, cfg, options.validation))
        if reasons:
            logger.info(f"chosen: {'; '.join(reasons)}")
    return model, task, cfg


def prepare_scenes(options: FinetuneOptions, cfg: TrainConfig) -> tuple[VisionLanguageModel, TrainingTask, TrainConfig]:
    """The embedded model with random weights, and its task: drawn scenes."""
    from nanovlm.synthetic import recipe  # here: other data do without the drawer

    model, processor = recipe.make_model(cfg.seed)
    get_batch, tokenizer = recipe.SceneBatches(processor, cfg.batch_size, cfg.seed), processor.tokenizer.to_json()
    return model, TrainingTask(get_batch, tokenizer, options.out, save_dtype=recipe.CHECKPOINT_DTYPE), cfg


def choose_settings(
    options: FinetuneOptions, cfg: TrainConfig, width: int, mixture: Mixture
) -> tuple[TrainConfig, Sequence[str]]:
    """cfg with the steps that options.epochs ask for and the settings that options.automatic leave open; and why."""
    automatic, steps_per_epoch = options.automatic, count_steps_per_epoch(mixture, cfg)
    if options.epochs is not None:
        if not steps_per_epoch:
            raise UsageError("--epochs needs data whose size is known, unlike a stream's or scenes'; use --max-steps")
        cfg = replace(cfg, max_steps=max(1, math.ceil(round(options.epochs * steps_per_epoch, 6))))
        automatic = [name for name in automatic if name != "max_steps"]
    if resumed := stored_settings(options.out):
        optimizer = resumed.get("optimizer")
    else:
        optimizer = None if options.backbones else find_optimizer(snapshot_path(options.model, options.revision))
    return choose(cfg, automatic, width=width, optimizer=optimizer, steps_per_epoch=steps_per_epoch)


def find_optimizer(folder: Path) -> str | None:
    """The optimizer that a model was trained by, as run.json or the metadata of its card say."""
    if (folder / RUN_FILE).is_file() and (optimizer := read_object(folder / RUN_FILE).get("optimizer")):
        return optimizer
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.search(r"^optimizer: (\w+)$", text, re.MULTILINE)
    return found[1] if found else None


def starts_anew(options: FinetuneOptions) -> bool:
    """Whether training starts from a model that no folder holds: joined backbones, or one in another layout."""
    return options.backbones is not None or options.format == "smolvlm"


def base_model(options: FinetuneOptions) -> BaseModel:
    """The model to start from, a folder by its full path."""
    if starts_anew(options):
        return BaseModel(str((options.out / BASE).resolve()))
    folder = Path(options.model)
    return BaseModel(str(folder.resolve()) if folder.is_dir() else os.fspath(options.model), options.revision)


def check_folder(folder: Path, data: Sequence[str | os.PathLike[str]]) -> None:
    """UsageError or InputError for a folder to which a model cannot be written, or only over something else."""
    check_output_folder(folder)
    if (folder / WEIGHTS).exists() and not checkpoint_paths(folder):
        raise UsageError(f"--out {folder} holds a model but no checkpoints to resume from; name another folder")
    if folder.resolve() in [Path(parse_data(text)[0]).resolve() for text in data]:
        raise UsageError(f"--out {folder} holds the data; name another folder for the model")


def load_start(options: FinetuneOptions) -> tuple[VisionLanguageModel, Processor, torch.dtype]:
    """The model to start from, in float32 on the CPU, its processor, and the dtype to save it in."""
    choose_device(options.device)  # raises for one that is not here, before anything is loaded
    if options.backbones:
        with torch.random.fork_rng():  # the projector and the rows of new tokens are the same at every start
            torch.manual_seed(0)
            vision, language = options.backbones
            captioner = Captioner.from_backbones(vision, language, format=options.format or "nanovlm")
        return captioner.model, captioner.processor, torch.float32
    folder = snapshot_path(options.model, options.revision)
    cfg = load_config(folder)
    if options.format:
        check_format(cfg, options.format)
    tokenizer = Tokenizer.from_pretrained(folder, cfg)
    model, processor = load_model(folder, cfg, tokenizer.image_token_id), Processor(cfg, tokenizer)
    if options.format == "smolvlm":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, processor = convert_layout(model, tokenizer)
    return model, processor, checkpoint_dtype(folder)


def answer_scorer(
    held_out: Mixture, positions: Sequence[int], processor: Processor, metrics: dict[str, Metric], cfg: TrainConfig
) -> tuple[Callable[[VisionLanguageModel, bool], Evaluation] | None, int]:
    """A model's scored answers to some questions of the held-out examples at positions, or to all; how many are some.

    These are cfg.validation_questions, or all where there are fewer.
    """
    if not cfg.validation_questions:
        return None, 0
    groups = [held_out.pick(0, position) for position in positions]
    questions = ask((source.path, source[i]) for source, i in groups)
    how = EvaluationOptions(metrics, max_new_tokens=MAX_ANSWER_TOKENS, skip_errors=True, show_progress=False)

    def answer(model: VisionLanguageModel, everything: bool) -> Evaluation:
        asked = questions if everything else questions[: cfg.validation_questions]
        return evaluate(Captioner(model, processor), QuestionList(asked), how)

    return answer, min(cfg.validation_questions, len(questions))
