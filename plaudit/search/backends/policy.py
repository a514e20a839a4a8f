"""The policy interface of a search: requests for the next steps of a path, and its implementation by our engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from plaudit.config.search import StepsTable
from plaudit.errors import RequestError
from plaudit.search.backends.step_text import StepText

if TYPE_CHECKING:
    from plaudit.core import Engine, SamplingParams
    from plaudit.core.branches import Continuation
    from plaudit.core.kv.prefix import Place

Ended = Literal["step", "end", "length"]
# The expected length of most steps of a level: this quantile of the previous level's lengths, at least LEAST_STEPS.
MOST, LEAST_STEPS = 0.95, 8


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request for `count` next steps of one path.

    prompt        token ids of the prompt
    response_ids  token ids of the steps so far
    text          the steps so far as text
    seed          of sampling: the same path gets the same steps in every method and every batch
    greedy        use greedy decoding
    place         where the path ends in the engine's KV cache: Step.place of its last step
    """

    prompt: tuple[int, ...]
    prompt_text: str
    response_ids: tuple[int, ...]
    text: str
    count: int
    seed: int
    greedy: bool = False
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step, or an error. `ended`: by the step's stop text, by the end of the response, or by the token limit.
    `place`: where its path ends in the KV cache of an engine of this process, valid until released."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    ended: Ended = "step"
    logprob: float | None = None
    """Mean over its tokens."""
    error: str | None = None
    place: Place | None = None


class Policy(Protocol):
    def extend(self, requests: Sequence[StepRequest]) -> list[list[Step]]:
        """The steps of each request. A failure of one path is returned as its error; a failure of all is raised."""

    def release(self, places: Sequence[Place]) -> None:
        """Releases the paths that end at these places."""

    def close(self) -> None: ...


class CorePolicy:
    """Our engine: children of a node share its KV cache, and released paths are freed at once."""

    def __init__(self, engine: Engine, table: StepsTable) -> None:
        from plaudit.core.text import stop_tokens

        self.engine = engine
        self.table = table
        self._lock = threading.Lock()  # an engine is not thread-safe
        self._expected_length: int | None = None  # in tokens
        self._by_place = engine.branching and stop_tokens(engine.tokenizer, (table.stop,)).ids is not None
        self._text = StepText(engine.tokenizer)
        self._params = lru_cache(maxsize=1 << 12)(self._new_params)

    def extend(self, requests: Sequence[StepRequest]) -> list[list[Step]]:
        if not requests:
            return []
        try:
            with self._lock:
                continuations = self._continuations(requests)
        except RequestError as error:
            if len(requests) == 1:
                return [[Step(error=str(error))] * requests[0].count]
            return [steps for request in requests for steps in self.extend([request])]
        return [
            [self._step(request, each) for each in own] for request, own in zip(requests, continuations, strict=True)
        ]

    def release(self, places: Sequence[Place]) -> None:
        with self._lock:
            self.engine.branches().free_paths(places)

    def close(self) -> None:
        """Does nothing: the engine's memory is freed with the object."""

    def _new_params(self, count: int, written: int, greedy: bool) -> SamplingParams:
        from plaudit.core import SamplingParams

        table = self.table
        left = min(table.max_step_tokens, max(1, table.max_tokens - written))
        return SamplingParams(
            n=count, temperature=0.0 if greedy else table.temperature, top_p=1.0 if greedy else table.top_p,
            stop=(table.stop,), max_tokens=left,
        )  # fmt: skip

    def _continuations(self, requests: Sequence[StepRequest]) -> list[list[Continuation]]:
        paths = [[*request.prompt, *request.response_ids] for request in requests]
        params = [self._params(request.count, len(request.response_ids), request.greedy) for request in requests]
        seeds = [request.seed for request in requests]
        if self._by_place:
            places = [request.place for request in requests]
            continuations = self.engine.branches().sample(paths, places, params, seeds, self._expected_length)
            lengths = sorted(len(each.tokens) for own in continuations for each in own)
            self._expected_length = max(LEAST_STEPS, lengths[int(MOST * len(lengths))])
            return continuations
        continuations = [[] for _ in requests]
        for sample in self.engine.generate(paths, params, seeds=seeds, text=False):
            continuations[sample.group].append(self.engine.branches().continuation(sample))
        return continuations

    def _step(self, request: StepRequest, continuation: Continuation) -> Step:
        if continuation.error is not None:
            return Step(error=f"generation failed: {continuation.error}")
        tokens = continuation.tokens
        ended: Ended = "length" if continuation.finish == "length" else "step"
        if tokens and tokens[-1] in self.engine.end_tokens:
            ended = "end"
        text = self._text(request.response_ids, request.text, tokens)
        return Step(tokens, text, ended, continuation.logprob, place=continuation.place)
