"""`nanovlm evaluate`: score a model's answers to the examples of a data set."""

import argparse
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm.cli.options import add_flags as add_record_flags
from nanovlm.cli.options import (
    add_model_flags,
    check_data_names,
    from_args,
    load_captioner,
    model_options,
)
from nanovlm.console import count, print_error
from nanovlm.errors import UsageError
from nanovlm.options import EVALUATION_MAX_NEW_TOKENS, ReadOptions, check_positive

if TYPE_CHECKING:
    from nanovlm.evaluation import Evaluation

HELP = "Score a model's answers to the examples of a data set."
EXAMPLE = "nanovlm evaluate --model out/mine --data photos --validation 0.05"
MAX_PROMPT = 40  # characters of a prompt in the table


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", nargs="+", action="extend", required=True, metavar="PATH", help="data as `nanovlm train` reads it")
    add_model_flags(parser)
    add_record_flags(parser, ReadOptions)
    add(
        "--validation",
        nargs="?",
        const="default",
        metavar="N_OR_SHARE_OR_PATH",
        help="ask only what training with the same --validation holds out; without a value, what it holds out by "
        "default (default: all examples)",
    )
    add("--limit", type=int, metavar="N", help="ask of each source at most the first N examples")
    add(
        "--metric",
        action="append",
        metavar="NAME",
        help="exact_match, f1, vqa_accuracy, anls, cider, or module:function(answer, references) of your own (default: "
        "all five)",
    )
    add("--batch-size", type=int, default=16, metavar="N", help="questions answered together (default: 16)")
    add(
        "--max-new-tokens",
        type=int,
        default=EVALUATION_MAX_NEW_TOKENS,
        metavar="N",
        help=f"maximum length of an answer (default: {EVALUATION_MAX_NEW_TOKENS})",
    )
    add("--json", action="store_true", help="print a JSON object with all answers instead of a table")
    add("--report", metavar="FILE.html", help="write a page of scores, and of the worst and some random answers")


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    check_data_names(args.data)
    model, read = model_options(args), from_args(ReadOptions, args)

    from nanovlm.data import open_data
    from nanovlm.evaluation import METRICS, EvaluationOptions, evaluate, load_metric, questions_of

    metrics = dict(map(load_metric, args.metric or ())) or METRICS
    validation = None if args.validation == "default" else args.validation or 0
    everything, held_out = open_data(args.data, read, validation)
    if args.validation and not held_out:
        raise UsageError("--validation: training holds nothing out of these data by default; name a number or omit it")
    questions = questions_of(held_out if args.validation else everything, args.limit, read.skip_errors)
    options = EvaluationOptions(metrics, args.batch_size, args.max_new_tokens, read.skip_errors)
    captioner = load_captioner(model)
    result = evaluate(captioner, questions, options)
    if result.skipped:
        print_error(f"{count(len(result.skipped), 'question')} skipped, the first: {result.skipped[0]}")
    print(as_json(str(model.model), result) if args.json else table(result))
    if args.report:
        from nanovlm.evaluation.report import write_report

        write_report(Path(args.report), f"{model.model} on {', '.join(args.data)}", result)
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """UsageError for a value out of range."""
    numbers = {"--limit": args.limit, "--batch-size": args.batch_size, "--max-new-tokens": args.max_new_tokens}
    check_positive(numbers)
    if args.report and Path(args.report).suffix.lower() != ".html":
        raise UsageError(f"--report {args.report}: name an .html file")
    if args.report and not os.access(Path(args.report).parent, os.W_OK | os.X_OK):
        raise UsageError(f"--report {args.report}: {Path(args.report).parent} is no folder that can be written")


def as_json(model: str, result: "Evaluation") -> str:
    """The scores of all answers, of each source and prompt, and every answer, as a JSON object."""
    answers = [
        {name: getattr(answer.question, name) for name in ("source", "name", "prompt")}
        | {"answer": answer.text, "references": list(answer.question.references), "scores": _numbers(answer.scores)}
        for answer in result.answers
    ]
    groups = [vars(group) | {"scores": _numbers(group.scores)} for group in result.groups(max_prompts=len(answers))]
    fields: dict[str, Any] = {"model": model, "questions": len(answers), "scores": _numbers(result.scores)}
    fields |= {"groups": groups, "answers": answers, "skipped": list(result.skipped)}
    return json.dumps(fields, ensure_ascii=False, indent=2, allow_nan=False)


def _numbers(scores: Mapping[str, float]) -> dict[str, float | None]:
    """The scores, None for those that are no finite numbers, of which JSON has none."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def table(result: "Evaluation") -> str:
    """A row for each source and prompt, and one for all if there are several sources."""
    if not result.answers:
        return "no questions"
    groups = result.groups()
    rows = [("", "questions", *result.scores)]
    for group in groups:
        name = group.source if group.prompt is None else f"  {_shortened(group.prompt)}"
        rows.append((name, f"{group.questions:,}", *(f"{value:.3f}" for value in group.scores.values())))
    if sum(group.prompt is None for group in groups) > 1:
        rows.append(("all", f"{len(result.answers):,}", *(f"{value:.3f}" for value in result.scores.values())))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )


def _shortened(prompt: str) -> str:
    text = " ".join(prompt.split())
    return text if len(text) <= MAX_PROMPT else text[: MAX_PROMPT - 3] + "..."
