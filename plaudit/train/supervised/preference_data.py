"""The examples of a preference run: every row encoded and checked before the first step, and what the policy of the
start thought of each response, computed once and kept in the run's directory.

    preferences/rows.jsonl      of a world: the policy's own responses to its problems, right ones over wrong ones
    preferences/reference.json  by the hash of an example: the log-probs of its two responses
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from plaudit.config import DataTable, PreferenceRecipe
from plaudit.core import Engine, SamplingParams
from plaudit.errors import DataError, RunError
from plaudit.models import Loaded
from plaudit.output import write_atomically
from plaudit.records import Sample
from plaudit.train.data.rows import FileRows, Row
from plaudit.train.rollouts.pairs import pairs_of, question_of
from plaudit.train.run.ranks import ALONE, Ranks, together
from plaudit.train.supervised.encode import Encoder
from plaudit.train.supervised.evaluate import MAX_ANSWER_TOKENS
from plaudit.train.supervised.examples import Labelled, Preferred
from plaudit.train.supervised.preferences import reference_logprobs
from plaudit.train.supervised.reader import Reader
from plaudit.worlds import get_world
from plaudit.worlds.sums import judge

FOLDER, ROWS = "preferences", "rows.jsonl"
Item = Preferred | Labelled
Base = Callable[[], AbstractContextManager[nn.Module]]


class PreferenceExamples:
    """`base` loads the initial policy while it is needed."""

    def __init__(
        self, recipe: PreferenceRecipe, directory: Path, encode: Encoder, base: Base, ranks: Ranks = ALONE
    ) -> None:
        self.recipe = recipe
        self.ranks = ranks
        self.file = FileRows(_source(recipe, directory), recipe.seed)
        train, self.heldout = (self._items(encode, rows) for rows in (self.file.rows, self.file.heldout()))
        if recipe.algorithm.method.reference:
            train, self.heldout = self._with_reference(directory / FOLDER / "reference.json", base, train)
        self._train = {row.origin: item for row, item in zip(self.file.rows, train, strict=True)}

    def train(self, index: int) -> Item:
        return self._train[self.file.train(index).origin]

    def _items(self, encode: Encoder, rows: Sequence[Row]) -> list[Item]:
        items = [item for row in rows if isinstance(item := encode(row), Preferred | Labelled)]
        return list(_with_others(items, encode.longest))

    def _with_reference(self, path: Path, base: Base, train: Sequence[Item]) -> tuple[list[Item], list[Item]]:
        items = [*train, *self.heldout]
        keys = [_key(item) for item in items]
        known: dict[str, tuple[float, float]] = json.loads(path.read_text()) if path.exists() else {}
        known = self.ranks.everyone.from_main(known, dict[str, tuple[float, float]])
        missing = [item for item, key in zip(items, keys, strict=True) if key not in known]
        if missing:
            with base() as model:
                logprobs = reference_logprobs(Reader(model, self.recipe.train.micro_batch_tokens, self.ranks), missing)
            known |= dict(zip(map(_key, missing), logprobs, strict=True))
            together(self.ranks.everyone, lambda: _write(path, known) if self.ranks.main else None)
        ready = [replace(item, reference=known[key]) for item, key in zip(items, keys, strict=True)]
        return ready[: len(train)], ready[len(train) :]


def write_samples(recipe: PreferenceRecipe, directory: Path, loaded: Loaded) -> str:
    """Pairs, or labelled responses, of the policy's own answers to a world's problems. Return a summary."""
    data = recipe.data
    assert data.world is not None
    world = get_world(data.world, recipe.seed, data.sums)
    problems = [world.problem("train", index) for index in range(data.problems)]
    engine = Engine(loaded.module, loaded.tokenizer, seed=recipe.seed)
    params = SamplingParams(n=data.samples, temperature=1.0, max_tokens=MAX_ANSWER_TOKENS)
    samples = engine.generate([problem.prompt for problem in problems], params)
    rows: list[dict[str, Any]] = []
    right = 0
    for number, problem in enumerate(problems):
        group = samples[number * data.samples : (number + 1) * data.samples]
        judged = [
            replace(
                s,
                reward=float(judge(problem, s.text).right),
                extra={"prompt": problem.prompt, "truth": str(problem.answer)},
            )
            for s in group
        ]
        right += sum(s.reward == 1 for s in judged)
        rows += pairs_of(judged, data.pairs) if recipe.algorithm.method.pairs else _labels(judged)
    tally = (
        f"{len(rows)} rows of {len(samples)} responses to {len(problems)} problems, {right / len(samples):.1%} right"
    )
    if not rows:
        raise DataError(f"{recipe.model.path}: {tally}: no response is better than another; raise data.problems")
    (directory / FOLDER).mkdir(exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(directory / FOLDER / ROWS, lines)
    return tally


def _write(path: Path, known: dict[str, tuple[float, float]]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(known))


def _labels(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    by_text = {sample.text: sample for sample in samples if sample.text}
    return [{**question_of(s), "response": s.text, "label": s.reward == 1} for s in by_text.values()]


def _source(recipe: PreferenceRecipe, directory: Path) -> DataTable:
    """Return the data table of the rows: the recipe's or, for a world, the file that `write_samples` wrote."""
    if recipe.data.world is None:
        return recipe.data
    path = directory / FOLDER / ROWS
    if not path.exists():
        raise RunError(f"{path} is missing and the run trains on it: restore it, or start over with --fresh")
    return recipe.data.model_copy(update={"world": None, "path": str(path)})


def _with_others(items: Sequence[Item], longest: int) -> Iterator[Item]:
    """Labelled items with the response to another prompt, of the nearest item before them that has one."""
    for number, item in enumerate(items):
        if isinstance(item, Labelled):
            before = (items[number - back] for back in range(1, len(items)))
            other = next((each for each in before if each.prompt != item.prompt), items[number - 1])
            item = replace(item, other=other.responses[0][: longest - len(item.prompt)])
        yield item


def _key(item: Item) -> str:
    return hashlib.blake2b(repr((item.prompt, *item.responses)).encode(), digest_size=16).hexdigest()
