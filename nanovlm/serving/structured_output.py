"""Answers that follow a JSON schema: llguidance tells which tokens may come next. Needs the extra `structured`."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nanovlm.processing.tokenizer import Tokenizer
from nanovlm.serving.errors import APIError

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
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS)
            problem = LLMatcher.validate_grammar(grammar, vocabulary)
        except ValueError as error:
            problem = str(error)
        if problem:
            reason = " ".join(problem.split())[:200]
            raise APIError(400, f"{param}: the JSON schema cannot be followed: {reason}", param=param)
        return [GrammarProcessor(LLMatcher(vocabulary, grammar)) for _ in range(n)]

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokens as bytes, for llguidance."""
        from llguidance import LLTokenizer

        tokenizer = self.tokenizer
        return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.cfg.lm_vocab_size, eos_token=tokenizer.eos_token_id)


class GrammarProcessor:
    """A `LogitsProcessor` that excludes the tokens a grammar does not allow next."""

    def __init__(self, matcher: Any):
        self.matcher = matcher

    def __call__(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        if generated:
            self.matcher.consume_token(generated[-1])
        else:  # a sequence may be started again
            self.matcher.reset()
        bias = self.matcher.compute_logit_bias()  # one byte a token, 0 where it is not allowed
        if self.matcher.is_error():
            raise RuntimeError(f"llguidance: {self.matcher.get_error()}")
        allowed = torch.frombuffer(bytearray(bias), dtype=torch.uint8) != 0
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))
