"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models import files
from nanovlm.errors import FileError, InputError, SchemaError, UsageError, needs_extra

if TYPE_CHECKING:
    from torch import Tensor

    from nanovlm.processing.tokenizer import Tokenizer

MAX_SCHEMA = 50_000  # characters; what longer ones need at each token would delay all other requests
UNFOLLOWED = "the JSON schema cannot be followed"
ONE_OBJECT = "write the properties in one object, or additionalProperties in each part"
PARTS = ("properties", "$ref", "allOf", "anyOf", "oneOf")
MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of schemas by name
VALUES = {"items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf"}  # schemas, or lists of them
SAYS_OTHERWISE = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
JSON_OPTIONS: Any = {"whitespace_flexible": False}  # or a small model could write spaces without end


def read_schema(path: str) -> Any:
    """The JSON schema in a file. UsageError if there is none, InputError if llguidance cannot follow it."""
    try:
        schema = json.loads(files.read_text(path))
        _grammar(schema)
    except FileError as error:
        raise UsageError(f"--json-schema {error}") from None
    except SchemaError as error:
        raise UsageError(f"--json-schema {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {path} is not JSON: {error}") from None
    return schema


class StructuredOutput:
    """Makes a logits processor for each sequence, for the vocabulary of one model. Threads may use it."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer

    def __reduce__(self) -> tuple:  # a copy makes its own vocabulary: llguidance's cannot be pickled
        return StructuredOutput, (self.tokenizer,)

    def make_processor(self, schema: Any) -> "GrammarProcessor":
        """A processor for one sequence. SchemaError if it cannot follow the schema."""
        grammar = _grammar(schema)
        from llguidance import LLMatcher

        try:
            vocabulary = self._vocabulary
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise SchemaError(f"no JSON schema can be followed with this model's tokenizer: {reason}") from None
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        matcher.compute_logit_bias()
        _check(matcher.get_error())
        return GrammarProcessor(matcher)

    @staticmethod
    def parse(text: str) -> Any:
        """The value that an answer by a schema is. InputError for one that max_new_tokens has cut."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise InputError(f"max_new_tokens ended the answer before its JSON did: {text!r}; raise it") from None

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokens as bytes, for llguidance."""
        from llguidance import LLTokenizer

        tokenizer = self.tokenizer
        return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.cfg.lm_vocab_size, eos_token=tokenizer.eos_token_id)


class GrammarProcessor:
    """A `LogitsProcessor` that excludes the tokens a grammar does not allow next.

    SchemaError if the grammar needs too much, or leads nowhere, which some schemas show at a later token only.
    """

    def __init__(self, matcher: Any):
        self.matcher = matcher
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
        _check(self.matcher.get_error(), self.n_consumed)
        allowed = torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def _closed(schema: Any) -> Any:
    """A schema in which objects that list properties have no others, unless they say so.

    SchemaError for an object in several parts, as each part alone would exclude the properties of the others.
    """
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed_inside(name, inner) for name, inner in schema.items()}
    if not (parts := _parts(schema)):
        return closed
    if len(parts) > 1:
        raise SchemaError(f"{UNFOLLOWED}: {parts[0]!r} beside {parts[1]!r}; {ONE_OBJECT}")
    several = schema[parts[0]]
    if parts == ["allOf"] and isinstance(several, list) and len(several) > 1 and any(map(_parts, several)):
        raise SchemaError(f"{UNFOLLOWED}: 'allOf' of several objects; {ONE_OBJECT}")
    return closed | {"additionalProperties": False} if parts == ["properties"] else closed


def _closed_inside(key: str, inner: Any) -> Any:
    """The value of a key of a schema, in which schemas are closed."""
    if key in MAPS and isinstance(inner, dict):
        return {name: _closed(one) for name, one in inner.items()}
    if key in VALUES:
        return [_closed(one) for one in inner] if isinstance(inner, list) else _closed(inner)
    return inner


def _parts(schema: Any) -> list[str]:
    """The keys by which a schema lists properties, or may, unless it says which others there are."""
    if not isinstance(schema, dict) or schema.keys() & SAYS_OTHERWISE:
        return []
    return [name for name in PARTS if schema.get(name)]


def _grammar(schema: Any) -> str:
    """llguidance's grammar of a schema."""
    with needs_extra("structured", "a JSON schema"):
        from llguidance import LLMatcher
    grammar = ""
    try:
        if (length := len(json.dumps(schema))) > MAX_SCHEMA:
            raise SchemaError(f"{UNFOLLOWED}: it has {length:,} characters, more than {MAX_SCHEMA:,}; shorten it")
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(_closed(schema)), defaults=JSON_OPTIONS)
        problem = LLMatcher.validate_grammar(grammar)
    except SchemaError:
        raise
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:
        problem = str(error)
    except TypeError as error:
        problem = str(error)
    _check(problem)
    return grammar


def _check(problem: str, n_tokens: int = 0) -> None:
    """Raise SchemaError for a problem of llguidance, whose own text goes on with the parser's state."""
    reason = " ".join(problem.partition("<state>")[0].split())[:200]
    if reason == "NoExtensionBias":  # no token may come next
        if n_tokens:
            remedy = "ask again with another seed, or simplify the schema"
            raise SchemaError(f"the grammar of the JSON schema ran into a dead end after {n_tokens} tokens; {remedy}")
        reason = "nothing satisfies it, as a $ref that leads to itself"
    if reason:
        raise SchemaError(f"{UNFOLLOWED}: {reason}")
