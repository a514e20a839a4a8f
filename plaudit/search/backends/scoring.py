"""Who scores steps: a process model of this process, or one behind `plaudit serve`. Both compute new tokens only.
For best-of-n also an outcome model, here or there, which scores a response once it is finished."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.config.search import OrmTable, PrmTable, SearchRecipe
from plaudit.errors import ConfigError, Refused, RequestError, RequestRefused
from plaudit.records import Item
from plaudit.search.backends.scored import Path, Scored, Scorer, items_of, last_scores, mismatch, whole_score

if TYPE_CHECKING:
    from plaudit.client.client import RewardClient
    from plaudit.core import Engine
    from plaudit.core.kv.prefix import Place
    from plaudit.reward.model import EncoderReward, ModelReward
    from plaudit.reward.process import ProcessReading
    from plaudit.reward.work import Work


class LocalScorer:
    whole = False

    def __init__(self, engine: Engine, reading: ProcessReading) -> None:
        self.engine = engine
        self.reading = reading
        self._lock = threading.Lock()  # an engine is for one thread at a time

    @property
    def computed(self) -> int:
        return self.engine.stats().tokens_computed

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        # Earlier steps were scored when they were the last: only the new one is put together, read and computed.
        grown = [self.reading.grown(path.read, path.prompt, path.steps) if path.read else None for path in paths]
        whole = iter(self._whole([path for path, work in zip(paths, grown, strict=True) if work is None]))
        works = [next(whole) if work is None else work for work in grown]
        places = [path.place if known is not None else None for path, known in zip(paths, grown, strict=True)]
        unread = [pair for pair in zip(works, places, strict=True) if not isinstance(pair[0], Scored)]
        values = iter(self._read(unread, hidden))  # type: ignore[arg-type]
        return [work if isinstance(work, Scored) else next(values) for work in works]

    def _whole(self, paths: Sequence[Path]) -> list[Work | Scored]:
        """What is to be read of each path's last step, or why there is nothing."""
        items = items_of(paths)
        works: list[Work | Scored] = []
        self.reading.prerender(items)
        for path, item in zip(paths, items, strict=True):
            try:
                work = self.reading.prepare(item)
            except Refused as error:
                works.append(Scored(error=f"{error.type}: {error}"))
                continue
            fits = work.steps == len(path.steps)
            last = replace(work, positions=work.positions[-1:], steps=1)
            works.append(last if fits else Scored(error=mismatch(work.steps, len(path.steps))))
        return works

    def release(self, places: Sequence[Place]) -> None:
        with self._lock:
            self.engine.branches().free_paths(places)

    def close(self) -> None:
        """The engine's memory goes with the object."""

    def _read(self, works: Sequence[tuple[Work, Place | None]], hidden: bool) -> list[Scored]:
        """The scores of the last steps. `places`: where what was read of them before ends."""
        if not works:
            return []
        try:
            with self._lock:
                values, places = self._values(works, hidden)
        except RequestError as error:
            if len(works) == 1:
                return [Scored(error=f"scoring_failed: {error}")]
            return [scored for work in works for scored in self._read([work], hidden)]
        width = self.engine.decoder.trunk.config.hidden_size if hidden else 0  # type: ignore[union-attr]
        labels = values.shape[1] - width
        scores = self.reading.last_scores(values[:, :labels])
        states = values[:, labels:] if hidden else [None] * len(works)
        unsound = f"nonfinite_score: {self.reading.facts.name} gave a step score that is not a finite number"
        return [
            Scored(error=unsound) if score is None else Scored(score, None, tuple(work.tokens), state, place)
            for (work, _), score, state, place in zip(works, scores, states, places, strict=True)
        ]

    def _values(
        self, works: Sequence[tuple[Work, Place | None]], hidden: bool
    ) -> tuple[np.ndarray, list[Place | None]]:
        ids, columns = [work.tokens for work, _ in works], works[0][0].columns
        if self.engine.branching:
            positions, places = [work.positions[-1] for work, _ in works], [place for _, place in works]
            return self.engine.branches().read(ids, places, positions, columns, hidden)
        at = [work.positions for work, _ in works]
        rows = self.engine.score(ids, positions=at, columns=columns, cache=True, hidden=hidden)
        return np.concatenate(rows), [self.engine.branches().place(tokens) for tokens in ids]


class OutcomeScorer:
    """An outcome model of this process."""

    whole = True

    def __init__(self, reward: ModelReward | EncoderReward) -> None:
        self.reward = reward

    @property
    def computed(self) -> int:
        return self.reward.computed

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        return [whole_score(result) for result in self.reward.score(items_of(paths))]

    def release(self, places: Sequence[Place]) -> None:
        """A response is read once, and nothing is kept of it."""

    def close(self) -> None:
        self.reward.close()


class ServedScorer:
    """The server keeps the scores and the KV of earlier steps: of a path that has grown only the new step is read."""

    computed = 0

    def __init__(self, client: RewardClient) -> None:
        self.client = client

    @cached_property
    def whole(self) -> bool:
        """The server says it when it is asked for the steps of anything."""
        try:
            self.client.score([Item(prompt="?", response="?")], steps=True)
        except RequestRefused as error:
            if error.type != "not_a_process_model":
                raise
            return True
        return False

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        if hidden:
            raise ConfigError('a server gives no hidden states: set search.clusters to "text", "encoder" or "served"')
        if self.whole:
            return [whole_score(result) for result in self.client.score(items_of(paths))]
        return last_scores(paths, self.client.score(items_of(paths), steps=True))

    def release(self, places: Sequence[Place]) -> None:
        """The server forgets by itself what is not asked for again."""

    def close(self) -> None:
        self.client.close()


def open_scorer(table: PrmTable, threads: int | None = None, method: str = "ets") -> Scorer:
    kind = "orm" if isinstance(table, OrmTable) else "prm"
    if table.protocol != "plaudit":
        from plaudit.search.backends.remote_scoring import open_remote

        return open_remote(table)
    if table.url is not None:
        from plaudit.client.client import RewardClient

        if table.key_env is not None and not os.environ.get(table.key_env):
            raise ConfigError(f"{kind}.key_env names the environment variable {table.key_env}, which is not set")
        key = os.environ[table.key_env] if table.key_env is not None else None
        return ServedScorer(RewardClient(table.url, model=table.model, api_key=key, timeout=table.timeout))
    from plaudit.config.reward import OutcomeTable, ProcessTable
    from plaudit.reward.directory import complete
    from plaudit.reward.load import load_reward, load_worker
    from plaudit.reward.model import EncoderReward, ModelReward
    from plaudit.reward.process import ProcessReading

    keys: dict[str, Any] = {
        "path": table.path, "format": table.format, "dtype": table.dtype, "device": table.device,
        "kv_bytes": table.kv_bytes, "threads": threads,
    }  # fmt: skip
    own = complete({key: value for key, value in keys.items() if value is not None}, f"{kind}.path {table.path}")
    if isinstance(own, OutcomeTable):
        if kind == "prm":
            _refuse_whole(table, method)  # before it is loaded
        reward = load_reward(own)
        assert isinstance(reward, ModelReward | EncoderReward)
        return OutcomeScorer(reward)
    if not isinstance(own, ProcessTable):
        raise ConfigError(f"{kind}.path {table.path} is a reward of kind {own.kind!r}: a search needs a process model")
    engine, facts, tokenizer, _ = load_worker(own)
    return LocalScorer(engine, ProcessReading(own, tokenizer, facts))


def open_scorers(recipe: SearchRecipe) -> tuple[Scorer, Scorer | None]:
    """Who scores on the way, and who, if not the same, gives a finished response its weight in the vote."""
    method = recipe.search.method
    outcome = None if recipe.orm is None else open_scorer(recipe.orm, recipe.threads, method)
    if outcome is not None and not outcome.whole:
        raise ConfigError(f"[orm] names {_name(recipe.orm)}, a process model: name it in [prm]")
    if recipe.prm is None:
        assert outcome is not None, "the recipe has one of them"
        return outcome, None
    return open_scorer(recipe.prm, recipe.threads, method), outcome


def check_fits(scorer: Scorer, recipe: SearchRecipe) -> None:
    """Refuses what a model of whole responses cannot do."""
    if scorer.whole:
        _refuse_whole(recipe.prm or recipe.orm, recipe.search.method)
    if (scorer.whole or recipe.orm is not None) and recipe.budget.lead and recipe.search.vote == "weighted":
        raise ConfigError(
            "budget.lead: the score of a whole response has no upper bound, so no lead in a weighted vote is safe; "
            'set search.vote = "majority", or leave budget.lead out'
        )


def _refuse_whole(table: PrmTable | None, method: str) -> None:
    if method != "best-of-n":
        raise ConfigError(
            f"search.method = {method!r} chooses among steps, and {_name(table)} is an outcome model, which scores "
            "whole responses: name a process model in [prm], or search with --method best-of-n"
        )


def _name(table: PrmTable | None) -> str:
    assert table is not None
    return str(table.path) if table.url is None else f"{table.model or 'the first model'} at {table.url}"
