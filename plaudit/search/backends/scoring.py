"""Scorers: a process model in this process, or behind `plaudit serve`. Both compute only new tokens. For best-of-n
also an outcome model, here or there, which scores finished responses."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

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
        self._lock = threading.Lock()  # an engine is not thread-safe

    @property
    def computed(self) -> int:
        return self.engine.stats().tokens_computed

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        # Earlier steps were scored when they were the last: only the new one is assembled, read and computed.
        grown = [self.reading.grown(path.read, path.prompt, path.steps) if path.read else None for path in paths]
        whole = iter(self._whole([path for path, work in zip(paths, grown, strict=True) if work is None]))
        works = [next(whole) if work is None else work for work in grown]
        places = [path.place if known is not None else None for path, known in zip(paths, grown, strict=True)]
        unread = [pair for pair in zip(works, places, strict=True) if not isinstance(pair[0], Scored)]
        values = iter(self._read(unread, hidden))  # type: ignore[arg-type]
        return [work if isinstance(work, Scored) else next(values) for work in works]

    def _whole(self, paths: Sequence[Path]) -> list[Work | Scored]:
        """The work for each path's last step, or an error."""
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
            last = structs.replace(work, positions=work.positions[-1:], steps=1)
            works.append(last if fits else Scored(error=mismatch(work.steps, len(path.steps))))
        return works

    def release(self, places: Sequence[Place]) -> None:
        with self._lock:
            self.engine.branches().free_paths(places)

    def close(self) -> None:
        """The model's memory is freed with the object."""

    def _read(self, works: Sequence[tuple[Work, Place | None]], hidden: bool) -> list[Scored]:
        """The scores of the last steps. `places`: the positions up to which their paths were read before."""
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
        unsound = f"nonfinite_score: {self.reading.facts.name} returned a step score that is not finite"
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
    """An outcome model in this process."""

    whole = True

    def __init__(self, reward: ModelReward | EncoderReward) -> None:
        self.reward = reward

    @property
    def computed(self) -> int:
        return self.reward.computed

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        return [whole_score(result) for result in self.reward.score(items_of(paths))]

    def release(self, places: Sequence[Place]) -> None:
        """Does nothing: a response is scored once, and nothing is cached."""

    def close(self) -> None:
        self.reward.close()


class ServedScorer:
    """The server caches the scores and the KV cache of earlier steps: of an extended path only the new step is
    computed."""

    computed = 0

    def __init__(self, client: RewardClient) -> None:
        self.client = client

    @cached_property
    def whole(self) -> bool:
        """The server reports it when steps are requested."""
        try:
            self.client.score([Item(prompt="?", response="?")], steps=True)
        except RequestRefused as error:
            if error.type != "not_a_process_model":
                raise
            return True
        return False

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        if hidden:
            raise ConfigError('a server returns no hidden states: set search.clusters to "text", "encoder" or "served"')
        if self.whole:
            return [whole_score(result) for result in self.client.score(items_of(paths))]
        return last_scores(paths, self.client.score(items_of(paths), steps=True))

    def release(self, places: Sequence[Place]) -> None:
        """Does nothing: the server evicts unused entries itself."""

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
            raise ConfigError(f"{kind}.key_env is {table.key_env}, but this environment variable is not set")
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
        raise ConfigError(f"{kind}.path {table.path} is a reward of kind {own.kind!r}; a search needs a process model")
    engine, facts, tokenizer, _ = load_worker(own)
    return LocalScorer(engine, ProcessReading(own, tokenizer, facts))


def open_scorers(recipe: SearchRecipe) -> tuple[Scorer, Scorer | None]:
    """The scorer of steps and, if different, the scorer that weights finished responses in the vote."""
    method = recipe.search.method
    outcome = None if recipe.orm is None else open_scorer(recipe.orm, recipe.threads, method)
    if outcome is not None and not outcome.whole:
        raise ConfigError(f"[orm] is {_name(recipe.orm)}, a process model: set it in [prm]")
    if recipe.prm is None:
        assert outcome is not None, "the recipe must have one of them"
        return outcome, None
    return open_scorer(recipe.prm, recipe.threads, method), outcome


def check_fits(scorer: Scorer, recipe: SearchRecipe) -> None:
    """Rejects settings that a model of whole responses does not support."""
    if scorer.whole:
        _refuse_whole(recipe.prm or recipe.orm, recipe.search.method)
    if (scorer.whole or recipe.orm is not None) and recipe.budget.lead and recipe.search.vote == "weighted":
        raise ConfigError(
            "budget.lead: the score of a whole response has no upper bound, so no lead in a weighted vote is decisive; "
            'set search.vote = "majority", or remove budget.lead'
        )


def _refuse_whole(table: PrmTable | None, method: str) -> None:
    if method != "best-of-n":
        raise ConfigError(
            f"search.method = {method!r} chooses among steps, and {_name(table)} is an outcome model, which scores "
            "whole responses: set a process model in [prm], or use --method best-of-n"
        )


def _name(table: PrmTable | None) -> str:
    assert table is not None
    return str(table.path) if table.url is None else f"{table.model or 'the first model'} at {table.url}"
