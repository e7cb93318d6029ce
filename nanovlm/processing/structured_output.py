"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models import files
from nanovlm.errors import FileError, InputError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from nanovlm.processing.tokenizer import Tokenizer

MAX_SCHEMA = 50_000  # characters; what longer ones need at each token would delay all other requests
CHOICES = {"anyOf", "oneOf"}
COMBINED = {"allOf", "if", "then", "else", *CHOICES}  # keys of schemas for the same value
MAPS = ("properties", "$defs", "definitions", "patternProperties")  # of schemas by name
VALUES = {"items", "prefixItems", "additionalProperties"}  # of schemas for values inside
SAYS_OTHERWISE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", *COMBINED}
JSON_OPTIONS: Any = {"whitespace_flexible": False}  # or a small model could write spaces without end


def read_schema(path: str) -> Any:
    """The JSON schema in a file. UsageError if there is none, InputError if llguidance cannot follow it."""
    try:
        schema = json.loads(files.read_text(path))
    except FileError as error:
        raise UsageError(f"--json-schema {error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {path} is not JSON: {error}") from None
    _grammar(schema, f"--json-schema {path}")
    return schema


class StructuredOutput:
    """Makes logits processors for the vocabulary of one model. Threads may use it."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer

    def __reduce__(self) -> tuple:  # a copy makes its own vocabulary: llguidance's cannot be pickled
        return StructuredOutput, (self.tokenizer,)

    def make_processors(self, schema: Any, n: int, param: str = "schema") -> list["GrammarProcessor"]:
        """One processor for each of n sequences. InputError names param if the schema is not possible."""
        grammar = _grammar(schema, param)
        from llguidance import LLMatcher

        try:
            vocabulary = self._vocabulary
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{param} is not possible with this model's tokenizer: {reason}") from None
        matchers = [LLMatcher(vocabulary, grammar, log_level=0) for _ in range(n)]
        matchers[0].compute_logit_bias()
        _check(matchers[0].get_error(), param)  # of a loop of $ref, for example
        return [GrammarProcessor(matcher, param) for matcher in matchers]

    @staticmethod
    def parse(text: str) -> Any:
        """The value that an answer by a schema is. InputError for one that max_new_tokens has cut."""
        try:
            return json.loads(text)
        except ValueError:
            raise InputError(f"max_new_tokens ended the answer before its JSON did: {text!r}; raise it") from None

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokens as bytes, for llguidance."""
        from llguidance import LLTokenizer

        tokenizer = self.tokenizer
        return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.cfg.lm_vocab_size, eos_token=tokenizer.eos_token_id)


class GrammarProcessor:
    """A `LogitsProcessor` that excludes the tokens a grammar does not allow next.

    InputError names param if the grammar turns out to need too much: a schema shows it at some later token only.
    """

    def __init__(self, matcher: Any, param: str):
        self.matcher = matcher
        self.param = param
        self.n_consumed = 0  # of the generated ids

    def forced_tokens(self, generated: Sequence[int]) -> list[int]:
        """The ids of the text that alone can follow; they count as generated."""
        self._consume(generated)
        forced: list[int] = self.matcher.compute_ff_tokens()
        self._consume([*generated, *forced])
        return forced

    def _consume(self, generated: Sequence[int]) -> None:
        self.matcher.consume_tokens(list(generated[self.n_consumed :]))
        self.n_consumed = len(generated)

    def __call__(self, generated: Sequence[int], logits: "Tensor") -> "Tensor":
        import torch

        if not generated:  # a sequence may be started again
            self.matcher.reset()
            self.n_consumed = 0
        self._consume(generated)
        bias = self.matcher.compute_logit_bias()  # one byte a token, 0 where it is not allowed
        _check(self.matcher.get_error(), self.param)
        allowed = torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def close_objects(schema: Any, shared: Collection[str] | None = None, is_part: bool = False) -> Any:
    """The schema, in which objects that list their properties have no others, unless it says so.

    Left open where schemas are combined for one object: each part would exclude the properties of the others. So is a
    definition that a part names, those in shared.
    """
    shared = _names_of_parts(schema) if shared is None else shared
    if isinstance(schema, list):
        return [close_objects(part, shared, is_part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in MAPS:
        if isinstance(schema.get(key), dict):
            parts = schema[key].items()
            closed[key] = {name: close_objects(part, shared, f"#/{key}/{name}" in shared) for name, part in parts}
    for key in VALUES & schema.keys():
        closed[key] = close_objects(schema[key], shared)
    for key in COMBINED & schema.keys():
        closed[key] = close_objects(schema[key], shared, is_part or key not in CHOICES or "properties" in schema)
    if "properties" in schema and not is_part and not schema.keys() & SAYS_OTHERWISE:
        closed["additionalProperties"] = False
    return closed


def _names_of_parts(schema: Any, is_part: bool = False) -> set[str]:
    """The $ref of definitions that are combined with other schemas for one object."""
    if isinstance(schema, list):
        return set().union(*(_names_of_parts(part, is_part) for part in schema))
    if not isinstance(schema, dict):
        return set()
    is_combined = is_part or "properties" in schema
    names = {schema["$ref"]} if is_combined and isinstance(schema.get("$ref"), str) else set()
    for key in MAPS:
        if isinstance(schema.get(key), dict):
            names |= _names_of_parts([*schema[key].values()])
    for key in VALUES & schema.keys():
        names |= _names_of_parts(schema[key])
    for key in COMBINED & schema.keys():
        names |= _names_of_parts(schema[key], is_combined or key not in CHOICES)
    return names


def _grammar(schema: Any, name: str) -> str:
    """llguidance's grammar of a schema; InputError calls it name."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise MissingExtraError(f"{name} needs llguidance; pip install 'nanovlm[structured]'") from None
    grammar = ""
    try:
        text = json.dumps(close_objects(schema))
        if len(text) > MAX_SCHEMA:
            raise InputError(f"{name}: a JSON schema of {len(text):,} characters, more than {MAX_SCHEMA:,}; shorten it")
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        problem = LLMatcher.validate_grammar(grammar)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        problem = str(error)
    _check(problem, name)
    return grammar


def _check(problem: str, name: str) -> None:
    """Raise InputError for a problem of llguidance, whose own text goes on with the parser's state."""
    reason = " ".join(problem.partition("<state>")[0].split())[:200]
    if reason == "NoExtensionBias":
        reason = "nothing satisfies it, as a $ref that leads to itself"
    if reason:
        raise InputError(f"{name}: the JSON schema cannot be followed: {reason}")
