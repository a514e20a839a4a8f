"""Structured output: responses that must match a JSON schema or a regular expression, by llguidance (extra
`structured`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import RequestError, one_line

SPACES = {"whitespace_pattern": r"[ \t\n\r]{0,16}"}  # otherwise a weak model may emit only whitespace


class Constraint:
    """The tokens that may come next in one sequence. Its state is a function of the tokens: when they do not continue
    what it has consumed (after a preemption, an interruption, or for a sample of another engine), it starts again."""

    def __init__(self, matcher: Any, ends: np.ndarray) -> None:
        """ends   (V,) bool: the end tokens"""
        self._matcher, self._ends = matcher, ends
        self._consumed: list[int] = []
        self.stuck: int | None = None
        """The number of tokens after which no token of the vocabulary matches."""

    def copy(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._ends)

    def follow(self, tokens: Sequence[int]) -> None:
        """Move to the state after these tokens of the response."""
        followed = len(self._consumed)
        if list(tokens[:followed]) != self._consumed:
            self._matcher.reset()
            self._consumed, self.stuck, followed = [], None, 0
        for token in tokens[followed:]:
            self.consume(token)

    def consume(self, token: int) -> None:
        if not self._over:
            self._matcher.consume_token(token)
        self._consumed.append(token)

    def barred(self) -> np.ndarray:
        """The forbidden tokens, (V,) bool. None once it has ended or is stuck: later draws are discarded."""
        if self._over:
            return np.zeros_like(self._ends)
        if not self._matcher.is_error():
            if self._matcher.is_stopped():  # the match is complete
                return ~self._ends
            barred: np.ndarray = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) == 0
            if not barred.all():
                return barred
        self.stuck = len(self._consumed)
        return np.zeros_like(self._ends)

    @property
    def _over(self) -> bool:
        return self.stuck is not None or bool(self._consumed and self._ends[self._consumed[-1]])


class Constraints:
    """Creates the constraints of requests, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self.tokenizer, self.vocab_size, self.end_tokens = tokenizer, vocab_size, end_tokens
        self._reads: Any = None  # llguidance's form of the tokenizer, which takes a second to create

    def of(self, params: SamplingParams) -> Constraint | None:
        if not params.constrained:
            return None
        name, text = ("regex", params.regex) if params.json_schema is None else ("json_schema", params.json_schema)
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise RequestError(f"{name} needs llguidance: pip install 'plaudit[structured]'") from None
        if self.tokenizer is None or not self.end_tokens:
            raise RequestError(
                f"{name} needs a tokenizer and an end token, and the engine lacks one: leave out {name}, or load the "
                "model with its tokenizer"
            )
        try:
            if self._reads is None:
                self._reads = from_tokenizer(self.tokenizer, self.vocab_size, sorted(self.end_tokens))
        except (ValueError, RuntimeError) as error:
            raise RequestError(f"{name}: llguidance cannot read this tokenizer: {one_line(error)}") from error
        make: Any = llguidance.LLMatcher
        try:
            grammar = make.grammar_from_regex(text) if name == "regex" else make.grammar_from_json_schema(text, SPACES)
            wrong, problems = make.validate_grammar_with_warnings(grammar, self._reads)
        except ValueError as error:
            wrong, problems = True, [str(error)]
        if wrong:
            raise RequestError(f"{name} cannot be used as a constraint: {one_line(ValueError(*problems))}")
        ends = np.zeros(self.vocab_size, dtype=bool)
        ends[sorted(self.end_tokens)] = True
        return Constraint(make(self._reads, grammar, log_level=0), ends)
