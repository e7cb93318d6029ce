"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovlm.errors import InputError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from nanovlm.processing.tokenizer import Tokenizer

MAX_SCHEMA = 50_000  # characters; what longer ones need at each token would delay all other requests
JSON_OPTIONS: Any = {"whitespace_flexible": False}  # or a small model could write spaces without end
# A program that prepares the grammar of its standard input within limits of CPU time (s), core files and memory (bytes)
COMPILING = """
import sys
from llguidance import LLMatcher, LLTokenizer
try:
    import resource
    for limit, value in (resource.RLIMIT_CPU, 2), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, 1 << 30):
        resource.setrlimit(limit, (value, value))
except (ImportError, ValueError):  # Windows has no such limits, macOS none of memory
    pass
LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0).compute_logit_bias()
"""


def read_schema(path: str) -> Any:
    """The JSON schema in a file. UsageError if there is none, InputError if llguidance cannot follow it."""
    try:
        schema = json.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--json-schema {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {path} is not JSON: {error}") from None
    _grammar(schema, f"--json-schema {path}")
    return schema


class StructuredOutput:
    """Makes logits processors for the vocabulary of one model. Threads may use it."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer

    def __reduce__(self) -> tuple:
        """A copy makes its own vocabulary: llguidance's cannot be pickled."""
        return StructuredOutput, (self.tokenizer,)

    def make_processors(
        self, schema: Any, n: int, param: str = "schema", untrusted: bool = False
    ) -> list["GrammarProcessor"]:
        """One processor for each of n sequences. InputError names param if the schema is not possible.

        An untrusted schema is refused as well if following it takes 2 seconds of CPU time or 1 GiB of memory.
        """
        grammar = _grammar(schema, param, untrusted)
        from llguidance import LLMatcher

        try:
            vocabulary = self._vocabulary
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{param} is not possible with this model's tokenizer: {reason}") from None
        matchers = [LLMatcher(vocabulary, grammar, log_level=0) for _ in range(n)]
        matchers[0].compute_logit_bias()
        if problem := matchers[0].get_error():  # of a loop of $ref, for example
            raise InputError(f"{param}: {_not_followed(problem)}")
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
    """A `Grammar` of a request: it excludes the tokens a grammar does not allow next.

    InputError names param if the grammar turns out to need too much: a schema shows it at some later token only.
    """

    def __init__(self, matcher: Any, param: str):
        self.matcher, self.param = matcher, param
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
        if self.matcher.is_error():
            raise InputError(f"{self.param}: {_not_followed(self.matcher.get_error())}")
        allowed = torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def _grammar(schema: Any, name: str, untrusted: bool = False) -> str:
    """llguidance's grammar of a schema; InputError calls it name."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise MissingExtraError(f"{name} needs llguidance; pip install 'nanovlm[structured]'") from None
    try:
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA:
            raise InputError(f"{name}: a JSON schema of {len(text):,} characters, more than {MAX_SCHEMA:,}; shorten it")
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        if untrusted and not _is_cheap(grammar):
            raise InputError(f"{name}: the JSON schema takes too much time or memory; use simpler patterns")
        problem = LLMatcher.validate_grammar(grammar)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        problem = str(error)
    if problem:
        raise InputError(f"{name}: {_not_followed(problem)}")
    return grammar


@lru_cache(256)
def _is_cheap(grammar: str) -> bool:
    """Whether a process of its own, with limits, can start with a grammar: llguidance has none for some patterns."""
    try:
        command = [sys.executable, "-c", COMPILING]
        return subprocess.run(command, input=grammar, text=True, capture_output=True, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _not_followed(problem: str) -> str:
    """One sentence for a problem of llguidance, whose own text goes on with the parser's state."""
    reason = " ".join(problem.partition("<state>")[0].split())[:200]
    if reason == "NoExtensionBias":
        reason = "nothing satisfies it, as a $ref that leads to itself"
    return f"the JSON schema cannot be followed: {reason}"
