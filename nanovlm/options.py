"""How an answer is generated: the keyword arguments that the Captioner's methods share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from models.decoding import GREEDY, SamplingParams
from nanovlm.errors import InputError

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
SENTENCE_END = re.compile(r"""[.!?…。！？]["'”’»)\]]*(?=\s|$)|[。！？]""")


class SamplingKwargs(TypedDict, total=False):
    """max_new_tokens and sampling; the fields of `SamplingParams` may be given one by one, too."""

    max_new_tokens: int
    sampling: SamplingParams
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


class GenerationKwargs(SamplingKwargs, total=False):
    """The same with the fields of `Generation`."""

    start_with: str
    trim_incomplete: bool


@dataclass(frozen=True)
class Generation:
    """How an answer is generated."""

    max_new_tokens: int = 128
    sampling: SamplingParams = GREEDY
    start_with: str = ""  # the answer begins with this text, which the model continues
    trim_incomplete: bool = False  # cut the last sentence of an answer that max_new_tokens has ended

    def __post_init__(self) -> None:
        if not isinstance(self.start_with, str):
            raise InputError(f"start_with is a text, not {type(self.start_with).__name__}")

    @classmethod
    def from_kwargs(cls, kwargs: SamplingKwargs, known: Sequence[str] = ()) -> "Generation":
        """Those that keyword arguments ask for. InputError for a value, TypeError for an unknown name.

        known are the fields of this class that may be given, by default all.
        """
        values: dict[str, Any] = dict(kwargs)
        sampling = {name: values.pop(name) for name in SAMPLING_FIELDS if name in values}
        known = known or [field.name for field in fields(cls)]
        if unknown := values.keys() - set(known):
            names = ", ".join([*known, *SAMPLING_FIELDS])
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}; generation takes {names}")
        if sampling:
            values["sampling"] = replace(values.get("sampling", GREEDY), **sampling)
        return cls(**values)


def cut_incomplete_sentence(text: str) -> str:
    """The text up to the end of its last whole sentence; all of it, if it has none."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text
