"""A reward model in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plaudit.core import Engine
from plaudit.errors import Refused, RequestError
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import OutcomeReading
from plaudit.reward.reward import Result
from plaudit.reward.work import Work


class ModelReward:
    """cache: keep the KV of what was scored, so that a later call computes only what is new (a search does this)."""

    def __init__(
        self, engine: Engine, reading: OutcomeReading | ProcessReading, version: str, *, cache: bool = False
    ) -> None:
        self.engine = engine
        self.reading = reading
        self.version = version
        self.cache = cache
        self._lock = threading.Lock()

    def score(self, items: Sequence[Item]) -> list[Result]:
        self.reading.prerender(items)
        prepared = [self._prepare(item) for item in items]
        works = [work for work in prepared if isinstance(work, Work)]
        values = iter(self._read(works))
        return [self._finish(work, next(values)) if isinstance(work, Work) else self._failed(work) for work in prepared]

    def close(self) -> None:
        """The engine's memory goes with the object."""

    def _prepare(self, item: Item) -> Work | ItemError:
        try:
            return self.reading.prepare(item)
        except Refused as error:
            return ItemError(error.type, str(error))

    def _read(self, works: Sequence[Work]) -> list[np.ndarray | ItemError]:
        if not works:
            return []
        try:
            with self._lock:
                read: list[np.ndarray | ItemError] = [
                    *self.engine.score(
                        [work.tokens for work in works], positions=[work.positions for work in works],
                        columns=works[0].columns, cache=self.cache,
                    )
                ]  # fmt: skip
            return read
        except RequestError as error:
            if len(works) > 1:  # one bad item must not cost the others their scores
                return [value for work in works for value in self._read([work])]
            finite = "not finite" not in str(error)
            return [ItemError("scoring_failed" if finite else "nonfinite_score", str(error))]

    def _finish(self, work: Work, values: np.ndarray | ItemError) -> Result:
        if isinstance(values, ItemError):
            return self._failed(values)
        return replace(self.reading.finish(work, values), version=self.version)

    def _failed(self, error: ItemError) -> Result:
        kind = Score if isinstance(self.reading, OutcomeReading) else StepScores
        return kind(error=error, version=self.version)
