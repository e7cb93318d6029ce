"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from models import files
from nanovlm.errors import FileError, InputError, UsageError, needs_extra

if TYPE_CHECKING:
    from torch import Tensor

    from nanovlm.processing.tokenizer import Tokenizer

MAX_SCHEMA = 50_000  # characters; what longer ones need at each token would delay all other requests
ALTERNATIVES = ("anyOf", "oneOf")
SAME_VALUE = ("allOf", *ALTERNATIVES)  # keys of lists of schemas for the same value
MAPS = ("properties", "$defs", "definitions", "patternProperties")  # of schemas by name
VALUES = ("items", "prefixItems", "additionalProperties")  # of schemas for values inside
SAYS_OTHERWISE = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
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
    """Makes a logits processor for each sequence, for the vocabulary of one model. Threads may use it."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer

    def __reduce__(self) -> tuple:  # a copy makes its own vocabulary: llguidance's cannot be pickled
        return StructuredOutput, (self.tokenizer,)

    def make_processor(self, schema: Any, param: str = "schema") -> "GrammarProcessor":
        """A processor for one sequence. InputError names param if the schema is not possible."""
        grammar = _grammar(schema, param)
        from llguidance import LLMatcher

        try:
            vocabulary = self._vocabulary
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{param} is not possible with this model's tokenizer: {reason}") from None
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        matcher.compute_logit_bias()
        _check(matcher.get_error(), param)  # of a loop of $ref, for example
        return GrammarProcessor(matcher, param)

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


def close_objects(schema: Any) -> Any:
    """The schema, in which objects that list their properties have no others, unless it says so."""
    if not isinstance(schema, dict):
        return schema
    closing = _Closing(schema)
    closed = closing.value(schema)
    return closed | {"$defs": closed.get("$defs", {}) | closing.copies} if closing.copies else closed


class _Closing:
    """Closes the objects of a schema.

    Parts of one object stay open, as each would exclude the properties of the others: a last part closes the whole.
    A definition that is such a part gets an open copy, so that its other uses are closed.
    """

    def __init__(self, root: dict[str, Any]):
        self.root = root
        self.copies: dict[str, Any] = {}  # further definitions
        self.names: dict[str, str] = {}  # of the copies by $ref

    def value(self, schema: Any) -> Any:
        """The schema of a whole value, closed."""
        if not isinstance(schema, dict):
            return schema
        is_combined = "allOf" in schema or len(schema.keys() & {"properties", "$ref", *SAME_VALUE}) > 1
        closed = self.part(schema) if is_combined else self._with_members(schema, self.value)
        parts = self._parts(schema) if is_combined else [schema]
        names = [name for part in parts for name in _of_type(dict, part.get("properties"))]
        if names and not any(part.keys() & SAYS_OTHERWISE for part in parts):
            names += [name for part in parts for name in _of_type(list, part.get("required")) if isinstance(name, str)]
            whole = {"properties": {name: {} for name in names}, "additionalProperties": False}
            if is_combined:
                return closed | {"allOf": [*_of_type(list, closed.get("allOf")), whole, *self._apart(schema, parts)]}
            return closed | whole | {"properties": whole["properties"] | closed["properties"]}
        return closed

    def _apart(self, whole: dict[str, Any], parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Further parts of a whole, by which an alternative excludes the properties that only others of it list."""
        for alternatives in (_of_type(list, part.get(key)) for part in parts for key in ALTERNATIVES):
            listed = [_listed(self._parts(one)) for one in alternatives]
            alone = set().union(*listed) - _listed(self._parts(whole, alternatives))
            if any(alone - own for own in listed):
                apart = [{"properties": dict.fromkeys(sorted(alone - own), False)} for own in listed]
                yield {"anyOf": [{"allOf": [self.part(one), other]} for one, other in zip(alternatives, apart)]}

    def part(self, schema: Any) -> Any:
        """One of several schemas of the same value, open; those of values inside are closed."""
        if not isinstance(schema, dict):
            return schema
        opened = self._with_members(schema, self.part)
        ref = schema.get("$ref")
        if isinstance(ref, str) and (target := self._resolve(ref)) is not None:
            if ref not in self.names:
                self.names[ref] = name = f"open:{len(self.names)}"
                self.copies[name] = self.part(target)
            opened["$ref"] = f"#/$defs/{self.names[ref]}"
        return opened

    def _with_members(self, schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
        """A copy in which schemas of values inside are closed, and those of the same value changed."""
        changed = dict(schema)
        for key in MAPS:
            if isinstance(schema.get(key), dict):
                changed[key] = {name: self.value(inner) for name, inner in schema[key].items()}
        for key in VALUES:
            if key in schema:
                inner = schema[key]
                changed[key] = [self.value(one) for one in inner] if isinstance(inner, list) else self.value(inner)
        for key in SAME_VALUE:
            if isinstance(schema.get(key), list):
                changed[key] = [change(one) for one in schema[key]]
        return changed

    def _parts(self, schema: Any, without: Any = None) -> list[dict[str, Any]]:
        """A schema and all that are combined with it for the same value, without one list of them."""
        found: dict[int, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict) and id(part) not in found:
                found[id(part)] = part
                lists = [_of_type(list, part.get(key)) for key in SAME_VALUE]
                combined = chain.from_iterable(one for one in lists if one is not without)
                waiting += reversed([self._resolve(part.get("$ref")), *combined])
        return [*found.values()]

    def _resolve(self, ref: Any) -> Any:
        """The schema that a $ref names; None if there is none."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        found: Any = self.root
        for key in unquote(ref).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            members = found if isinstance(found, dict) else dict(enumerate(_of_type(list, found)))
            found = members.get(int(key) if isinstance(found, list) and key.isdecimal() else key)
        return found


def _listed(parts: list[dict[str, Any]]) -> set[str]:
    """The names of properties of a value that parts describe together."""
    return {name for part in parts for name in _of_type(dict, part.get("properties"))}


def _of_type(kind: type, value: Any) -> Any:
    """The value, or an empty one where a stranger's schema has another type."""
    return value if isinstance(value, kind) else kind()


def _grammar(schema: Any, name: str) -> str:
    """llguidance's grammar of a schema; InputError calls it name."""
    with needs_extra("structured", name):
        from llguidance import LLMatcher
    grammar = ""
    try:
        length = len(json.dumps(schema))
        if length <= MAX_SCHEMA:
            text = json.dumps(close_objects(schema))
            length = len(text)
        if length > MAX_SCHEMA:
            raise InputError(f"{name}: a JSON schema of {length:,} characters, more than {MAX_SCHEMA:,}; shorten it")
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        problem = LLMatcher.validate_grammar(grammar)
    except InputError:
        raise
    except RecursionError:
        problem = "it is nested too deeply"
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
