"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from models.inference.continuous_batching import LogitsProcessor
from nanovlm.errors import InputError
from nanovlm.processing.tokenizer import Tokenizer
from nanovlm.serving.errors import APIError

MAX_SCHEMA = 50_000  # characters; what longer ones need at each token would delay all other requests
JSON_OPTIONS: Any = {"whitespace_flexible": False}  # or a small model could write spaces without end


class StructuredOutput:
    """Makes logits processors for the vocabulary of one model. Threads may use it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def make_processors(self, schema: Any, n: int, param: str = "response_format") -> list["GrammarProcessor"]:
        """One processor for each of n sequences. APIError if the schema, the client's field param, is not possible."""
        try:
            from llguidance import LLMatcher

            vocabulary = self._vocabulary
        except ModuleNotFoundError:
            message = f"{param} needs llguidance on the server; pip install 'nanovlm[structured]'"
            raise APIError(400, message, param=param) from None
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            message = f"{param} is not possible with this model's tokenizer: {reason}"
            raise APIError(400, message, param=param) from None
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA:
            message = f"{param}: a JSON schema of {len(text):,} characters, more than {MAX_SCHEMA:,}; shorten it"
            raise APIError(400, message, param=param)
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
            problem = LLMatcher.validate_grammar(grammar, vocabulary)
            if not problem:
                matchers = [LLMatcher(vocabulary, grammar, log_level=0) for _ in range(n)]
                matchers[0].compute_logit_bias()
                problem = matchers[0].get_error()  # of a loop of $ref, for example
        except ValueError as error:
            problem = str(error)
        if problem:
            raise APIError(400, f"{param}: {not_followed(problem)}", param=param)
        return [GrammarProcessor(matcher, param) for matcher in matchers]

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
        self.matcher, self.param = matcher, param

    def __call__(self, generated: list[int], logits: Tensor) -> Tensor:
        if generated:
            self.matcher.consume_token(generated[-1])
        else:  # a sequence may be started again
            self.matcher.reset()
        bias = self.matcher.compute_logit_bias()  # one byte a token, 0 where it is not allowed
        if self.matcher.is_error():
            raise InputError(f"{self.param}: {not_followed(self.matcher.get_error())}")
        allowed = torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


class BiasProcessor:
    """A `LogitsProcessor` that adds a client's logit_bias, and lets a grammar, if there is one, exclude tokens then."""

    def __init__(self, bias: Mapping[int, float], grammar: LogitsProcessor | None):
        self.ids, self.values, self.grammar = list(bias), torch.tensor(list(bias.values())), grammar

    def __call__(self, generated: list[int], logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., self.ids] += self.values.to(logits)
        return logits if self.grammar is None else self.grammar(generated, logits)


def not_followed(problem: str) -> str:
    """One sentence for a problem of llguidance, whose own text goes on with the parser's state."""
    reason = " ".join(problem.partition("<state>")[0].split())[:200]
    if reason == "NoExtensionBias":
        reason = "nothing satisfies it, as a $ref that leads to itself"
    return f"the JSON schema cannot be followed: {reason}"
