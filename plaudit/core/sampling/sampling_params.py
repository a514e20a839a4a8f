"""The sampling parameters of a request, validated on creation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.errors import RequestError

CORE_ONLY = {
    "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "allowed_token_ids": None,
    "bad_words_ids": (), "json_schema": None, "regex": None, "top_logprobs": 0, "prompt_logprobs": None,
    "include_stop": False,
}  # fmt: skip
COLDEST = 1e-30  # below this temperature logits overflow float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    n               samples per prompt
    temperature     0 takes the most likely token, whose log-prob under the sampled distribution is then 0
    min_p, top_k, top_p   applied after the temperature, in this order; 0, 0 and 1 disable them. A top_k above the
                    vocabulary keeps all tokens
    stop            strings that end the text; the text ends before them, their tokens are kept
    include_stop    the text ends behind the stop string, and includes the text of a stop token
    stop_token_ids  tokens that end the sample, in addition to the model's end-of-sequence tokens; they are kept
    max_tokens      None: as many as the model has positions for
    min_tokens      no end-of-sequence or stop token before this many; stop strings are ignored before it too
    logit_bias      token id -> the value added to its logit
    repetition_penalty    over the prompt and the generated tokens: divides positive logits, multiplies others
    presence_penalty, frequency_penalty   over the generated tokens: subtracted from the logit once, or per occurrence
    allowed_token_ids     only these tokens may be sampled; None: all
    bad_words_ids         tokens that are never sampled
    json_schema, regex    what the response must match (extra `structured`); a schema may be a mapping or JSON
    top_logprobs    number of most likely tokens to report at each position
    prompt_logprobs None: nothing; else the log-prob of each prompt token, and this many of the most likely ones there
    seed            None: from the engine's seed and the number of the request
    priority        higher is scheduled first; waiting raises it, so that nothing starves
    deadline        seconds after submission at which the request is aborted
    salt            only requests with the same salt share KV, so that response times reveal nothing to other tenants
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[int, ...] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    include_stop: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words_ids", tuple(map(_single, self.bad_words_ids)))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        self._check_numbers()
        self._check_conflicts()

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or self.regex is not None

    @property
    def moves(self) -> bool:
        """Whether logits are changed before the temperature."""
        forbids = self.min_tokens > 0 or self.allowed_token_ids is not None or bool(self.bad_words_ids)
        return forbids or self.constrained or self.penalises or bool(self.logit_bias)

    @property
    def reshapes(self) -> bool:
        """Whether the sampled distribution differs from the softmax at the temperature."""
        return self.temperature > 0 and (self.truncates or self.moves)

    def core_only(self) -> list[str]:
        """The options in use that only the core supports; they are not passed to engines of other projects."""
        return [name for name, off in CORE_ONLY.items() if getattr(self, name) != off]

    def _check_numbers(self) -> None:
        _need(self.n >= 1, "n", self.n, "at least 1")
        _need(0 <= self.temperature <= 100, "temperature", self.temperature, "from 0 to 100")
        least = self.temperature == 0 or self.temperature >= COLDEST
        _need(least, "temperature", self.temperature, f"at least {COLDEST}, or 0 for the most likely token")
        _need(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _need(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _need(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _need(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _need(self.deadline is None or self.deadline > 0, "deadline", self.deadline, "above 0 seconds")
        _need(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2**63 - 1")
        _need(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _need(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2")
        _need(self.top_logprobs >= 0, "top_logprobs", self.top_logprobs, "0 (none) or more")
        count = self.prompt_logprobs
        _need(count is None or count >= 0, "prompt_logprobs", count, "None, or 0 (their own) or more")
        for token, bias in self.logit_bias.items():
            _need(math.isfinite(bias), f"logit_bias[{token}]", bias, "finite (bad_words_ids forbids a token)")

    def _check_conflicts(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower one or raise the other"
            )
        others = ("regex", "allowed_token_ids", "bad_words_ids", "min_tokens", "ignore_eos")
        beside = [name for name in others[self.json_schema is None :] if getattr(self, name)]
        if self.constrained and beside:
            raise RequestError(
                f"{' and '.join(beside)} cannot be combined with "
                f"{'regex' if self.json_schema is None else 'json_schema'}, which determines the tokens and the end "
                "itself: leave one of them out"
            )
        filters = [
            f"{name}={getattr(self, name)}"
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
            if getattr(self, name) != off
        ]
        if self.temperature == 0 and filters:
            raise RequestError(
                f"temperature 0 takes the most likely token, so {', '.join(filters)} has no effect: leave it out, or "
                "set a temperature above 0"
            )


def _single(word: int | Sequence[int]) -> int:
    ids = [word] if isinstance(word, int) else list(word)
    if len(ids) != 1:
        raise RequestError(f"bad_words_ids has {ids}: only single tokens can be forbidden, give each as one id")
    return ids[0]


def _texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in texts:
        raise RequestError("stop has an empty string, which ends every text at once: remove it")
    return texts


def _need(right: bool, name: str, value: object, rule: str) -> None:
    if not right:
        raise RequestError(f"{name} is {value}, and must be {rule}")
