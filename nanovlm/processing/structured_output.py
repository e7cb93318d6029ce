"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
from collections.abc import Sequence
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from models.common import files
from nanovlm.errors import FileError, InputError, SchemaError, UsageError, needs_extra

if TYPE_CHECKING:
    from torch import Tensor

    from nanovlm.processing.tokenizer import Tokenizer

MAX_SCHEMA = 50_000  # characters; what longer ones need at each token would delay all other requests
MAX_PARTS = 1000
UNFOLLOWED = "the JSON schema cannot be followed"
ALTERNATIVES = ("anyOf", "oneOf")
DEFINITIONS = {"$defs", "definitions"}
# Keys that allow all values
NOTES = {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title", *DEFINITIONS}
MAPS = {"properties", "patternProperties", *DEFINITIONS}  # of schemas by name
VALUES = {"items", "prefixItems", "additionalProperties", *ALTERNATIVES}  # schemas, or lists of them
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


class _Closing:
    """Closes the objects of a schema: those that list properties have no others, unless the schema says so.

    Parts of one object (allOf, or properties beside $ref, anyOf or oneOf) are joined, as each part alone would exclude
    the properties of the others. SchemaError for parts that differ in more than their properties.
    """

    def __init__(self, root: Any):
        self.root = root
        self.n_parts = 0

    def value(self, schema: Any) -> Any:
        """The schema of a whole value, closed."""
        if not isinstance(schema, dict):
            return schema
        said = schema.keys() - NOTES
        parts = _of_type(list, schema.get("allOf"))
        if said == {"allOf"} and len(parts) == 1 and isinstance(parts[0], dict):
            return self.value({name: schema[name] for name in schema if name != "allOf"} | parts[0])
        if parts or said > {"$ref"}:
            schema = self._joined(schema)
        for key in ALTERNATIVES:
            if schema.keys() & {"properties", *ALTERNATIVES} > {key}:
                rest = {name: schema[name] for name in schema if name not in {key, *DEFINITIONS}}
                either = [self.value(self._both(rest, self._joined(one))) for one in _of_type(list, schema[key])]
                schema = {name: schema[name] for name in schema if name in DEFINITIONS}
                return {name: self._inside(name, inner) for name, inner in schema.items()} | {key: either}
        closed = {name: self._inside(name, inner) for name, inner in schema.items()}
        is_open = not schema.get("properties") or schema.keys() & SAYS_OTHERWISE
        return closed if is_open else closed | {"additionalProperties": False}

    def _inside(self, key: str, inner: Any) -> Any:
        """The value of a key of a schema, in which schemas are closed."""
        if key in MAPS and isinstance(inner, dict):
            return {name: self.value(one) for name, one in inner.items()}
        if key in VALUES:
            return [self.value(one) for one in inner] if isinstance(inner, list) else self.value(inner)
        return inner

    def _joined(self, schema: Any) -> dict[str, Any]:
        """A part of a value, without allOf and $ref."""
        self.n_parts += 1
        if self.n_parts > MAX_PARTS:
            raise SchemaError(f"{UNFOLLOWED}: more than {MAX_PARTS} parts of objects")
        whole = {name: value for name, value in _of_type(dict, schema).items() if name not in ("$ref", "allOf")}
        parts = _of_type(list, schema.get("allOf"))
        if "$ref" in schema:
            target = self._resolve(schema["$ref"])
            parts = [{name: target[name] for name in target if name not in DEFINITIONS}, *parts]
        return reduce(self._both, map(self._joined, parts), whole)

    def _both(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        """Two parts of a value as one."""
        both = other | one
        for key in sorted((one.keys() & other.keys()) - NOTES):
            if key == "required":
                both[key] = one[key] + other[key]
            elif key == "properties":
                shared = one[key].keys() & other[key].keys()
                both[key] = one[key] | other[key]
                both[key] |= {name: {"allOf": [one[key][name], other[key][name]]} for name in shared}
            elif one[key] != other[key]:
                raise SchemaError(f"{UNFOLLOWED}: parts of one value differ in {key!r}; write them as one schema")
        for part in (one, other):
            is_closed = part.get("additionalProperties", True) is not True
            if is_closed and both.get("properties", {}).keys() - part.get("properties", {}).keys():
                raise SchemaError(f"{UNFOLLOWED}: a part has additionalProperties; write the parts as one schema")
        return both

    def _resolve(self, ref: Any) -> dict[str, Any]:
        """The schema that a $ref of this document names."""
        found: Any = self.root
        for key in unquote(str(ref)).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            members = found if isinstance(found, dict) else dict(enumerate(_of_type(list, found)))
            found = members.get(int(key) if isinstance(found, list) and key.isdecimal() else key)
        if not str(ref).startswith("#") or not isinstance(found, dict):
            raise SchemaError(f"{UNFOLLOWED}: $ref {ref!r} names no schema here")
        return found


def _of_type(kind: type, value: Any) -> Any:
    """The value, or an empty one where a stranger's schema has another type."""
    return value if isinstance(value, kind) else kind()


def _grammar(schema: Any) -> str:
    """llguidance's grammar of a schema."""
    with needs_extra("structured", "a JSON schema"):
        from llguidance import LLMatcher
    grammar = ""
    try:
        text = json.dumps(schema)
        if len(text) <= MAX_SCHEMA:
            text = json.dumps(_Closing(schema).value(schema))
        if len(text) > MAX_SCHEMA:
            raise SchemaError(f"{UNFOLLOWED}: it has {len(text):,} characters, more than {MAX_SCHEMA:,}; shorten it")
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        problem = LLMatcher.validate_grammar(grammar)
    except SchemaError:
        raise
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:
        problem = str(error)
    except (AttributeError, TypeError) as error:
        problem = f"a value has the wrong type: {error}"
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
