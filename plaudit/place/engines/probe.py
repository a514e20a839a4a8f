"""Checks that an engine uses the weights it reports: compares its log-probs after fixed tokens with the trainer's.

A checksum tells that the bytes arrived, not that they are used: vLLM kept an old packed head, and any engine may keep
old KV. Two checks follow every publication:

1. Do both give the same log-probs, to a tolerance? It must allow for other kernels and dtypes, and one update may move
   log-probs by less.
2. Have the engine's log-probs moved as the trainer's have, since the engine was last seen to follow? What the trainer's
   moved is d, the engine's x; x·d / d·d is 1 if it follows and 0 if it stands still. Asked once d is well above what
   engine and trainer differ by anyhow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from plaudit.errors import ProbeFailed

TOKENS = 160  # of a context: more than a block of any engine's prefix cache, so that old KV shows
LIKELIEST = 20  # log-probs per context, vLLM's default maximum
CLEAR = 4.0  # d counts if it is so many times the usual difference
FLOOR = 1e-5  # of that difference, in log-probs


class Probed(Protocol):
    name: str

    def top_logprobs(self, context: Sequence[int], count: int) -> dict[int, float]: ...


class Probe:
    """contexts    token ids, after which the next token's log-probs are compared
    tolerance   of the mean difference
    """

    def __init__(self, contexts: Sequence[Sequence[int]], tolerance: float) -> None:
        self.contexts = contexts
        self.tolerance = tolerance
        self._seen: list[np.ndarray] | None = None  # the trainer's, when the engine last was seen to follow
        self._version = 0  # ... and which version that was
        self._usual = FLOOR

    def check(self, engine: Probed, trainer: Callable[[Sequence[int]], np.ndarray], version: int) -> dict[str, float]:
        """`trainer` gives the log-probs of all tokens after a context. Raises ProbeFailed; else metrics."""
        ours = [trainer(context) for context in self.contexts]
        # vLLM 0.32 crashes if more log-probs than tokens are requested.
        theirs = [engine.top_logprobs(context, min(LIKELIEST, len(ours[0]))) for context in self.contexts]
        tokens = [np.fromiter(top, np.int64) for top in theirs]
        engines = np.concatenate([np.fromiter(top.values(), np.float64) for top in theirs])
        trainers = _at(ours, tokens)
        difference = float(np.abs(engines - trainers).mean())
        metrics = {"probe/abs_mean": difference, "probe/abs_max": float(np.abs(engines - trainers).max())}
        if not difference <= self.tolerance:
            raise ProbeFailed(
                f"{engine.name} was sent version {version} and its log-probs differ from the trainer's by "
                f"{difference:.3g} in the mean, {self.tolerance:g} is allowed (engine.probe): it does not use these "
                "weights"
            )
        if self._seen is not None:
            moved = trainers - (before := _at(self._seen, tokens))
            if np.abs(moved).mean() <= CLEAR * self._usual:
                return metrics  # too little to tell: the next version will have moved further from what was seen
            metrics["probe/follows"] = float((engines - before) @ moved / (moved @ moved))
            if not metrics["probe/follows"] > 0.5:
                raise ProbeFailed(
                    f"{engine.name} was sent version {version} and its log-probs have moved by "
                    f"{metrics['probe/follows']:.2g} of what the trainer's have since version {self._version}: it does "
                    "not use these weights"
                )
        self._seen, self._version = ours, version
        self._usual = max(self._usual, difference)
        return metrics


def _at(distributions: Sequence[np.ndarray], tokens: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([each[at] for each, at in zip(distributions, tokens, strict=True)]).astype(np.float64)


def probe_contexts(prompts: Sequence[Sequence[int]], positions: int) -> list[list[int]]:
    """Two contexts out of a run's own prompts: the first alone, and many joined, as far as the positions reach."""
    joined: list[int] = []
    while len(joined) < TOKENS:
        joined += [token for prompt in prompts for token in prompt]
    return [list(prompts[0]), joined[: min(TOKENS, positions - 1)]]
