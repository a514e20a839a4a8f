"""Steps of a path that were read before.

A search sends its paths again and again, each time with a step more. What a causal model says at a position does not
depend on what comes after it, so every position is kept on its own: of a path that has grown only the new positions are
asked for, and the worker's prefix tree has the rest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plaudit.reward.work import Work
from plaudit.serve.workers.cache import ScoreCache, step_keys
from plaudit.serve.workers.jobs import Answer


class Path:
    """A work and what is known of it. `rest` is what must be computed; None if nothing must."""

    def __init__(self, work: Work, version: str, salt: str, cache: ScoreCache, *, recall: bool) -> None:
        self._cache = cache
        self._keys = step_keys(version, work.tokens, work.positions, work.columns, salt, work.logprobs)
        self._cached: list[np.ndarray] = []
        for key in self._keys if recall else ():
            values = cache.get(key)
            if values is None:
                break
            self._cached.append(values)
        positions = work.positions[len(self._cached) :]
        self.rest = replace(work, tokens=work.tokens[: positions[-1] + 1], positions=positions) if positions else None

    def joined(self, answer: Answer | None) -> Answer:
        """The rows of all positions, given those of `rest`; an error stays one."""
        if answer is None:
            return np.concatenate(self._cached)
        if not isinstance(answer, np.ndarray):
            return answer
        for key, row in zip(self._keys[len(self._cached) :], answer, strict=True):
            self._cache.put(key, row[None].copy())
        return np.concatenate([*self._cached, answer])
