"""Caches the steps of a search path by position.

A search sends its paths repeatedly, each time with one more step. The output of a causal model at a position does not
depend on later tokens, so every position is cached separately: of an extended path only the new positions are
requested, and the worker's prefix tree has the KV cache of the rest.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from plaudit.reward.work import Work
from plaudit.serve.workers.cache import ScoreCache, step_keys
from plaudit.serve.workers.jobs import Answer


class Path:
    """A work and its cached rows. `rest` is the part still to be computed; None if there is none."""

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
        """The rows of all positions, given those of `rest`; an error is returned unchanged."""
        if answer is None:
            return np.concatenate(self._cached)
        if not isinstance(answer, np.ndarray):
            return answer
        for key, row in zip(self._keys[len(self._cached) :], answer, strict=True):
            self._cache.put(key, row[None].copy())
        return np.concatenate([*self._cached, answer])
