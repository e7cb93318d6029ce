"""SamplingParams: how a token is chosen. Each field of a record of options tells its default, limits and help once."""

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, get_args

from models.common.errors import InputError

MAX_NEW_TOKENS = 128  # of a caption
QUANTIZATIONS = ("int8", "int4")
RepetitionDetection = tuple[int, int, int]  # shortest and longest cycle in tokens, and how often it is repeated

BOUNDS = {  # of a number, by their names in `setting`
    "minimum": (operator.ge, "at least"), "above": (operator.gt, "above"),
    "maximum": (operator.le, "at most"), "below": (operator.lt, "below"),
}  # fmt: skip


def setting(
    default: Any, help: str = "", limits: str = "", fits: Callable[[Any], bool] | None = None, **flag: Any
) -> Any:
    """A field of an options record: default, help, and the check fits(value), whose limits an error names.

    flag holds bounds of a number (see BOUNDS), choices, and arguments of argparse such as metavar. Without help there
    is no flag. The default itself is always allowed. A number without a lower bound is at least 0; a float is finite.
    """
    if isinstance(default, int | float) and not flag.keys() & {"minimum", "above"}:
        flag["minimum"] = 0
    if isinstance(default, float) and not flag.keys() & {"maximum", "below"}:
        flag["below"] = math.inf
    return field(default=default, metadata={"help": help, "limits": limits, "fits": fits, **flag})


def check_settings(record: Any) -> None:
    """Raise InputError for the first field of a record whose value is of another type, or not within its limits."""
    for f in fields(record):
        value = getattr(record, f.name)
        choices = f.metadata.get("choices")
        fits = f.metadata.get("fits")
        types = get_args(f.type) or (f.type,)
        bounds = [(*BOUNDS[name], f.metadata[name]) for name in BOUNDS if name in f.metadata]
        kind, kind_name = (Real, "number") if float in types else (Integral, "whole number")
        if value is f.default or (value is None and type(None) in types):
            continue
        if bool in types and value not in (True, False):
            raise InputError(f"{value!r} must be True or False", field=f.name)
        if choices and value not in choices:
            raise InputError(f"{value} is none of {', '.join(choices)}", field=f.name)
        with suppress(TypeError):  # the value is of a type that fits cannot take
            if not fits or fits(value):
                fits = None
        if fits:
            raise InputError(f"{value} must be {f.metadata['limits']}", field=f.name)
        if bounds and not isinstance(value, kind):
            raise InputError(f"{value} must be a {kind_name}", field=f.name)
        if not all(is_within(value, bound) for is_within, _, bound in bounds):
            limits = " and ".join(f"{words} {bound}" for _, words, bound in bounds)
            raise InputError(f"{value} must be {limits}", field=f.name)


def _is_detection(value: Any) -> bool:
    if len(value) != 3 or not all(isinstance(n, Integral) for n in value):
        return False
    return value[2] == 0 or (1 <= value[0] <= value[1] and value[2] > 1)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is chosen from logits. The default is greedy; the filters apply in the order of the fields.

    The repetition penalty is that of Keskar et al. 2019, the next two are OpenAI's, top_p is that of Holtzman et al.
    2019, min_p that of Nguyen et al. 2024, repetition_detection vLLM's. InputError for a value out of range.
    """

    repetition_penalty: float = setting(
        1.0, "above 1, tokens of the prompt and the answer become less likely", minimum=1e-3, maximum=1e9
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's logit each time it is in the answer; below 0 favors it", minimum=-2, maximum=2
    )
    presence_penalty: float = setting(
        0.0, "subtracted once from the logits of tokens in the answer; below 0 favors them", minimum=-2, maximum=2
    )
    temperature: float = setting(
        0.0, "sampling temperature; 0 is greedy", "0 (greedy), or a number from 1e-30 to 1e30",
        lambda value: value == 0 or 1e-30 <= value <= 1e30,
    )  # fmt: skip
    top_k: int = setting(0, "sample among the K most likely tokens; 0 is all", metavar="K")
    top_p: float = setting(
        1.0, "sample among the most likely tokens whose probabilities sum to P", metavar="P", minimum=1e-30, maximum=1
    )
    min_p: float = setting(0.0, "drop tokens less likely than P times the likeliest", metavar="P", maximum=1)
    seed: int | None = setting(None, "seed of the random generator, for reproducible samples", minimum=0, below=2**63)
    repetition_detection: RepetitionDetection = setting(  # noqa: RUF009
        (0, 0, 0), "end an answer that repeats a cycle of MIN to MAX tokens COUNT times; a COUNT of 0 is off",
        "three whole numbers: MIN to MAX tokens, from 1 on, and a COUNT of 0 (off), or 2 or more", _is_detection,
        nargs=3, metavar=("MIN", "MAX", "COUNT"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen, with no regard to other tokens."""
        return self.temperature == 0 and not self.counts_output

    @property
    def counts_output(self) -> bool:
        """True if a penalty depends on the tokens generated so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


GREEDY = SamplingParams()
