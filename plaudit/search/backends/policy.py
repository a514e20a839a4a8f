"""Who writes the next steps: what is asked of a generator, and our own engine as one."""

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
MOST, LEAST_STEPS = 0.95, 8  # of a level's steps, by whose end the next level's are looked at first


@dataclass(frozen=True, slots=True)
class Ask:
    """`count` next steps of one path.

    prompt        token ids of the prompt
    response_ids  token ids of the steps so far
    text          the steps so far as text
    seed          decides the draws: the same path gets the same steps in every method and every batch
    greedy        the most likely step
    place         where the path ends in the engine: Step.place of its last step
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
    """One step, or why there is none. `ended`: by the step's stop text, by the response's end, or for want of room.
    `place`: where its path ends, in an engine of this process, until that is released."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    ended: Ended = "step"
    logprob: float | None = None
    """Mean over its tokens."""
    error: str | None = None
    place: Place | None = None


class Policy(Protocol):
    def extend(self, asks: Sequence[Ask]) -> list[list[Step]]:
        """The steps of each ask. What fails for one path is that path's error; what fails for all is raised."""

    def release(self, places: Sequence[Place]) -> None:
        """The paths that end there are given up."""

    def close(self) -> None: ...


class CorePolicy:
    """Our engine: children of a node share its KV, and what is given up is freed at once."""

    def __init__(self, engine: Engine, table: StepsTable) -> None:
        from plaudit.core.text import stop_tokens

        self.engine = engine
        self.table = table
        self._lock = threading.Lock()  # an engine is for one thread at a time
        self._most_end_by: int | None = None  # tokens, by those of the level before
        self._by_place = engine.branching and stop_tokens(engine.tokenizer, (table.stop,)).ids is not None
        self._text = StepText(engine.tokenizer)
        self._params = lru_cache(maxsize=1 << 12)(self._new_params)

    def extend(self, asks: Sequence[Ask]) -> list[list[Step]]:
        if not asks:
            return []
        try:
            with self._lock:
                continuations = self._continuations(asks)
        except RequestError as error:
            if len(asks) == 1:
                return [[Step(error=str(error))] * asks[0].count]
            return [steps for ask in asks for steps in self.extend([ask])]
        return [[self._step(ask, each) for each in own] for ask, own in zip(asks, continuations, strict=True)]

    def release(self, places: Sequence[Place]) -> None:
        with self._lock:
            self.engine.branches().free_paths(places)

    def close(self) -> None:
        """The engine's memory goes with the object."""

    def _new_params(self, count: int, written: int, greedy: bool) -> SamplingParams:
        from plaudit.core import SamplingParams

        table = self.table
        left = min(table.max_step_tokens, max(1, table.max_tokens - written))
        return SamplingParams(
            n=count, temperature=0.0 if greedy else table.temperature, top_p=1.0 if greedy else table.top_p,
            stop=(table.stop,), max_tokens=left,
        )  # fmt: skip

    def _continuations(self, asks: Sequence[Ask]) -> list[list[Continuation]]:
        paths = [[*ask.prompt, *ask.response_ids] for ask in asks]
        params = [self._params(ask.count, len(ask.response_ids), ask.greedy) for ask in asks]
        seeds = [ask.seed for ask in asks]
        if self._by_place:
            places = [ask.place for ask in asks]
            continuations = self.engine.branches().sample(paths, places, params, seeds, self._most_end_by)
            lengths = sorted(len(each.tokens) for own in continuations for each in own)
            self._most_end_by = max(LEAST_STEPS, lengths[int(MOST * len(lengths))])
            return continuations
        continuations = [[] for _ in asks]
        for sample in self.engine.generate(paths, params, seeds=seeds, text=False):
            continuations[sample.group].append(self.engine.branches().continuation(sample))
        return continuations

    def _step(self, ask: Ask, continuation: Continuation) -> Step:
        if continuation.error is not None:
            return Step(error=f"generation failed: {continuation.error}")
        tokens = continuation.tokens
        ended: Ended = "length" if continuation.finish == "length" else "step"
        if tokens and tokens[-1] in self.engine.end_tokens:
            ended = "end"
        text = self._text(ask.response_ids, ask.text, tokens)
        return Step(tokens, text, ended, continuation.logprob, place=continuation.place)
