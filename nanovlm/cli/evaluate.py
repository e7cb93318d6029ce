"""`nanovlm evaluate`: score a model's answers to the examples of a data set."""

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from nanovlm.cli.options import add_record_flags, check_data_names, flag_of, from_args, load_captioner, model_options
from nanovlm.console import count, print_error, table
from nanovlm.errors import CheckpointError, UsageError
from nanovlm.options import ModelOptions, ReadOptions, check_positive, parse_data
from nanovlm.training.config import RUN_FILE, read_run

if TYPE_CHECKING:
    from nanovlm.data import Source
    from nanovlm.evaluation import Evaluation

HELP = "Score a model's answers to the examples of a data set."
EXAMPLE = "nanovlm evaluate --model out/mine --data photos --validation 0.05"
MAX_PROMPT = 40  # characters of a prompt in the table


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", nargs="+", action="extend", required=True, metavar="PATH", help="data as `nanovlm train` reads it")
    add_record_flags(parser, ModelOptions)
    add_record_flags(parser, ReadOptions)
    ask = "ask only what training with the same --validation holds out; without a value, what the model's run.json "
    ask += "says was held out, else what training holds out by default (default: all examples)"
    add("--validation", nargs="?", const=True, metavar="N_OR_SHARE_OR_PATH", help=ask)
    add("--limit", type=int, metavar="N", help="ask of each source at most the first N examples")
    names = "exact_match, f1, vqa_accuracy, anls, cider, or module:function(answer, references) of your own"
    add("--metric", action="append", metavar="NAME", help=f"{names} (default: all five)")
    add("--batch-size", type=int, default=16, metavar="N", help="questions answered together (default: 16)")
    length = "maximum length of an answer (default: that of the longest reference, and 16 more)"
    add("--max-new-tokens", type=int, metavar="N", help=length)
    add("--json", action="store_true", help="print a JSON object with all answers instead of a table")
    add("--report", metavar="FILE.html", help="write a page of wrong answers and doubtful labels")


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    check_data_names(args.data)
    model = model_options(args)

    from nanovlm.data.mixture import source_lines
    from nanovlm.evaluation import METRICS, EvaluationOptions, evaluate, in_words, load_metric, questions_of

    metrics = dict(map(load_metric, args.metric or ())) or METRICS
    read = from_args(ReadOptions, args, model_prompt=model.prompt)
    training = training_run(Path(model.adapter or model.model), args.data)
    everything, held_out = open_asked(args.data, read, args.validation, training)
    for line in source_lines(everything, held_out):
        print_error(line)
    if note := note_of_training(args.validation, training):
        print_error(f"note: {model.adapter or model.model} {note}")
    sources = held_out if args.validation else everything
    skipped = [error for source in sources for error in source.errors]
    questions = questions_of(sources, args.limit, skipped if read.skip_errors else None)
    options = EvaluationOptions(metrics, args.batch_size, args.max_new_tokens, read.skip_errors)
    captioner = load_captioner(model)
    result = evaluate(captioner, questions, options, skipped)
    if result.skipped:
        print_error(f"{count(len(result.skipped), 'question')} skipped, the first: {result.skipped[0]}")
    print(as_json(str(model.model), result) if args.json else scores_table(result))
    if advice := result.advice():
        print_error(f"note: {advice}")
    if args.report:
        from nanovlm.evaluation.evaluate import doubtful_labels
        from nanovlm.evaluation.report import write_report

        facts = [in_words(result.scores, len(result.answers))]
        doubts = doubtful_labels(captioner, [answer.question for answer in result.answers])
        title = f"{model.model} on {', '.join(args.data)}"
        write_report(Path(args.report), title, result, facts=facts, doubts=doubts)
    return 0


@dataclass(frozen=True)
class TrainingRun:
    """Contents of the run.json beside a model: all its data, which of them are asked now, and what was held out."""

    data: Sequence[str] = ()
    asked: Sequence[str] = ()
    validation: Any = None  # as --validation takes it; None is the default of training


def training_run(folder: Path, data: Sequence[str]) -> TrainingRun:
    """The run that trained the model in a folder or checkpoint; an empty one without a run.json or with other data."""
    folder = Path(os.path.abspath(folder))
    folder = folder.parents[1] if folder.parent.name == "checkpoints" else folder
    content = read_run(folder)
    trained = content.get("data", [])
    validation = content.get("validation")
    is_list = isinstance(trained, list) and all(isinstance(text, str) for text in trained)
    if not is_list or not isinstance(validation, str | float | int | None):
        problem = f"data={trained} and validation={validation} are no flags of a training"
        raise CheckpointError(f"{folder / RUN_FILE}: {problem}; correct or remove it")
    names = set(map(_place, trained))
    return TrainingRun(trained, [text for text in data if _place(text) in names], validation)


def _place(text: str) -> str:
    """A name of data without its share, absolute if it is a path; as it is if it has no valid share."""
    with suppress(UsageError):
        text, _ = parse_data(text)
    return os.path.realpath(text) if os.path.exists(text) else text


def open_asked(
    data: Sequence[str], read: ReadOptions, validation: Any, training: TrainingRun
) -> tuple[list["Source"], list["Source"]]:
    """Return all examples, and those to ask: what --validation or, without a value, the model's own run holds out.

    All sources of that run are opened, because a number to hold out counts over all of them. UsageError if none is
    held out.
    """
    from nanovlm.data import open_data
    from nanovlm.data.mixture import parse_validation

    if validation is not True or not training.asked:
        everything, held_out = open_data(data, read, None if validation is True else validation or 0)
        advice = "name a number or a share, or omit it"
    elif others := [text for text in data if text not in training.asked]:
        raise UsageError(
            f"--validation: the model was not trained on {', '.join(others)}; ask that apart, without --validation"
        )
    else:
        names = {_place(text): text for text in data}  # as the person wrote them
        everything, held_out = open_data(
            [names.get(_place(text), text) for text in training.data], read, training.validation
        )
        if parse_validation(training.validation)[0] is None:
            asked = set(map(_place, training.asked))
            everything = [one for one in everything if _place(one.path) in asked]
            held_out = [one for one in held_out if _place(one.path) in asked]
        advice = "the model was trained on all of them; omit --validation to ask what it remembers"
    if validation and not held_out:
        raise UsageError(f"--validation: nothing of these data is held out; {advice}")
    return everything, held_out


def note_of_training(validation: Any, training: TrainingRun) -> str | None:
    """Warning for a person who reads the scores: the model may have been trained on what it is asked."""
    if not training.asked:
        return None
    if not validation:
        names = ", ".join(training.asked)
        return f"was trained on {names}: scores on these examples say what it remembers; --validation asks the others"
    own = training.validation
    if validation is True or own is None or _place(str(validation)) == _place(str(own)):
        return None
    return f"held out {own}, not {validation}: it may have learned these examples; --validation alone asks its own"


def check_flags(args: argparse.Namespace) -> None:
    """UsageError for a value out of range."""
    names = ("limit", "batch_size", "max_new_tokens")
    check_positive({flag_of(name): getattr(args, name) for name in names})
    if args.report and Path(args.report).suffix.lower() != ".html":
        raise UsageError(f"--report {args.report}: name an .html file")
    if args.report and not os.access(Path(args.report).parent, os.W_OK | os.X_OK):
        raise UsageError(f"--report {args.report}: {Path(args.report).parent} is no folder that can be written")


def as_json(model: str, result: "Evaluation") -> str:
    """The scores of all answers, of each source and prompt, and every answer, as a JSON object."""
    from nanovlm.evaluation.metrics import for_json, intervals

    n = len(result.answers)
    answers = [
        {name: getattr(answer.question, name) for name in ("source", "name", "prompt")}
        | {"answer": answer.text, "references": [*answer.question.references], "scores": for_json(answer.scores)}
        for answer in result.answers
    ]
    groups = [
        {"source": source, "prompt": prompt, "questions": len(group.answers), "scores": for_json(group.scores)}
        for source, prompt, group in result.groups(max_prompts=n)
    ]
    fields: dict[str, Any] = {"model": model, "questions": n, "scores": for_json(result.scores)}
    fields |= {"intervals": intervals(result.scores, n), "groups": groups, "answers": answers}
    fields["skipped"] = list(result.skipped)
    return json.dumps(fields, ensure_ascii=False, indent=2, allow_nan=False)


def scores_table(result: "Evaluation") -> str:
    """A row for each source and prompt, one for all if there are several sources, and one of 95% intervals."""
    from nanovlm.evaluation.metrics import intervals  # here, as its package imports torch

    if not result.answers:
        return "no questions"
    groups = result.groups()
    if sum(prompt is None for _, prompt, _ in groups) > 1:
        groups.append(("all", None, result))
    rows = [("", "questions", *result.scores)]
    for source, prompt, group in groups:
        name = source if prompt is None else f"  {shorten(prompt, MAX_PROMPT, placeholder='...')}"
        rows.append((name, f"{len(group.answers):,}", *(f"{value:.3f}" for value in group.scores.values())))
    found = intervals(result.scores, len(result.answers))
    cells = ("{:.3f}-{:.3f}".format(*found[name]) if name in found else "" for name in result.scores)
    rows.append(("95% interval", "", *cells))
    return table(rows)
