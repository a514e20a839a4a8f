"""A reward model that runs in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plaudit.core import Engine
from plaudit.errors import Refused, RequestError
from plaudit.models.text_classifier import TextClassifier, next_batch
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import OutcomeReading
from plaudit.reward.reward import Result
from plaudit.reward.work import Work


class _ReadReward(ABC):
    """Converts items to works and the model's rows to scores; subclasses compute the rows in `_rows`."""

    def __init__(self, reading: OutcomeReading | ProcessReading, version: str) -> None:
        self.reading = reading
        self.version = version
        self._lock = threading.Lock()

    @abstractmethod
    def _rows(self, works: Sequence[Work]) -> list[np.ndarray]:
        """(positions, values) for each work."""

    def score(self, items: Sequence[Item]) -> list[Result]:
        self.reading.prerender(items)
        prepared = [self._prepare(item) for item in items]
        works = [work for work in prepared if isinstance(work, Work)]
        values = iter(self._read(works))
        return [self._finish(work, next(values)) if isinstance(work, Work) else self._failed(work) for work in prepared]

    def close(self) -> None:  # noqa: B027 (neither kind has anything to close)
        """The model's memory is freed with the object."""

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
                return [*self._rows(works)]
        except RequestError as error:
            if len(works) > 1:  # one bad item must not fail the others
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


class ModelReward(_ReadReward):
    """cache: keep the KV cache between calls, so that a later call computes only new tokens (used by a search)."""

    def __init__(
        self, engine: Engine, reading: OutcomeReading | ProcessReading, version: str, *, cache: bool = False
    ) -> None:
        super().__init__(reading, version)
        self.engine = engine
        self.cache = cache

    @property
    def computed(self) -> int:
        """The number of tokens computed so far."""
        return self.engine.stats().tokens_computed

    def _rows(self, works: Sequence[Work]) -> list[np.ndarray]:
        return self.engine.score(
            [work.tokens for work in works], positions=[work.positions for work in works], columns=works[0].columns,
            cache=self.cache,
        )  # fmt: skip


class EncoderReward(_ReadReward):
    def __init__(self, classifier: TextClassifier, reading: OutcomeReading | ProcessReading, version: str) -> None:
        super().__init__(reading, version)
        self.classifier = classifier
        self.computed = 0

    def _rows(self, works: Sequence[Work]) -> list[np.ndarray]:
        left = {place: len(work.tokens) for place, work in enumerate(works)}
        rows: dict[int, np.ndarray] = {}
        while left:
            batch = next_batch(left, self.classifier.budget)
            values = self.classifier.logits([works[i].tokens for i in batch], [works[i].types for i in batch])
            rows |= {place: value[None] for place, value in zip(batch, values, strict=True)}
            self.computed += sum(left.pop(place) for place in batch)
        return [rows[place] for place in range(len(works))]
