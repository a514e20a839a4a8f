"""Runs a search from its recipe: opens models and servers, searches the questions, stores the results."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from plaudit.collector import frozen
from plaudit.config.search import SearchRecipe
from plaudit.search.backends.embedding import open_embedder
from plaudit.search.backends.policy import CorePolicy, Policy
from plaudit.search.backends.scored import Scorer
from plaudit.search.backends.scoring import check_fits, open_scorers
from plaudit.search.drivers.driver import Driver
from plaudit.search.drivers.methods import new_driver
from plaudit.search.lanes import run_lanes
from plaudit.search.pilot import Chosen, choose
from plaudit.search.questions.questions import GymChecker, Question, open_questions
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.record import Record, result
from plaudit.search.runner import Outcome, Runner
from plaudit.search.tree.tree import Tree
from plaudit.search.when import following
from plaudit.search.workers import SearchWorkers

Progress = Callable[[int, int], None]
"""Called with the number of finished questions and the total."""


class Search:
    """Owns the models. `policy` and `scorer` are opened from the recipe unless given."""

    def __init__(
        self, recipe: SearchRecipe, *, policy: Policy | None = None, scorer: Scorer | None = None, tokenizer: Any = None
    ) -> None:  # fmt: skip
        if recipe.threads is not None:
            import torch

            torch.set_num_threads(recipe.threads)
        if policy is None:
            policy, tokenizer = open_policy(recipe)
        self.policy, self.tokenizer = policy, tokenizer
        self.scorer, self.outcome = (scorer, None) if scorer is not None else open_scorers(recipe)
        self.checker = GymChecker() if recipe.data.gym is not None else None
        self._begin(recipe)

    def _begin(self, recipe: SearchRecipe) -> None:
        check_fits(self.scorer, recipe)
        self.recipe = recipe
        self.embedder = open_embedder(recipe.search)
        self.reading = AnswerReading(recipe.steps)
        self._stopped = threading.Event()
        self.lanes = [self._runner() for _ in range(recipe.groups)]

    def use_recipe(self, recipe: SearchRecipe) -> None:
        """Switches to a recipe that differs only in [search]: its method, with the same models."""
        self._end()
        self._begin(recipe)

    def choose_method(self, questions: Sequence[Question], before: str | None = None) -> Chosen:
        """`method = "auto"`: selects the method for these questions, or uses the one chosen `before`."""
        recipe, reading = self.recipe, AnswerReading(self.recipe.steps)
        try:
            choice = Chosen(before, "") if before is not None else choose(recipe, questions, self._searched, reading)
        finally:
            reading.close()
        self.use_recipe(following(recipe, choice.method))
        return choice

    def _searched(self, recipe: SearchRecipe, questions: Sequence[Question]) -> list[Outcome]:
        self.use_recipe(recipe)
        return sorted(self.run(questions), key=lambda outcome: outcome.question.index)

    def questions(self) -> list[Question]:
        return open_questions(self.recipe.data, self.tokenizer, self.recipe.seed, self.checker)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, summed over lanes."""
        return {name: sum(lane.phases[name] for lane in self.lanes) for name in self.lanes[0].phases}

    @property
    def undecided(self) -> int:
        """The number of answers that could not be compared."""
        return self.reading.alike.undecided

    def run(self, questions: Iterable[Question]) -> Iterator[Outcome]:
        """Outcomes as they finish; see `Runner.run`."""
        return run_lanes(self.lanes, questions, self._stopped)

    def lines(self, questions: Iterable[Question]) -> Iterator[dict[str, Any]]:
        """The same as lines of results.jsonl."""
        return map(result, self.run(questions))

    def _runner(self) -> Runner:
        recipe, reading = self.recipe, self.reading

        def driver(question: Question, tree: Tree) -> Driver:
            return new_driver(tree, recipe.search, recipe.budget, reading, f"{recipe.seed} {question.index}")

        return Runner(
            recipe, self.policy, self.scorer, reading, driver, self.embedder, self._stopped, outcome=self.outcome
        )

    def _end(self) -> None:
        self.reading.close()
        if self.embedder is not None:
            self.embedder.close()

    def close(self) -> None:
        self._end()
        self.policy.close()
        self.scorer.close()
        if self.outcome is not None:
            self.outcome.close()
        if self.checker is not None:
            self.checker.close()


def open_policy(recipe: SearchRecipe) -> tuple[Policy, Any]:
    """The policy, and the tokenizer of prompts."""
    from plaudit.models import choose_device, load_policy, load_tokenizer, resolve

    if recipe.engine.name != "core":
        from plaudit.search.backends.remote import RemotePolicy

        tokenizer = load_tokenizer(resolve(recipe.model.path))
        return RemotePolicy(recipe.engine, recipe.steps), tokenizer
    from plaudit.core import Engine

    loaded = load_policy(recipe.model.path, recipe.model.dtype, choose_device(recipe.model.device))
    table = recipe.engine
    engine = Engine(loaded.module, loaded.tokenizer, kv_bytes=table.kv_bytes, state_every=table.state_every)
    return CorePolicy(engine, recipe.steps), loaded.tokenizer


def run_searches(
    recipes: Mapping[Path, SearchRecipe],
    bar: Callable[[str], AbstractContextManager[Progress]],
    *,
    resume: bool = False,
    fresh: bool = False,
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs `plaudit search`: recipes that differ only in [search], each in its directory, with models that are loaded
    once; yields their summaries. `bar` shows the progress of a search. On Ctrl-C finished results are kept, and
    KeyboardInterrupt is raised."""
    with ExitStack() as opened:
        records = [
            opened.enter_context(Record(directory, recipe, resume=resume, fresh=fresh))
            for directory, recipe in recipes.items()
        ]  # before loading models, so that a bad directory is reported at once
        search = opened.enter_context(closing(_opened([record.recipe for record in records])))
        opened.enter_context(frozen())
        for record in records:
            if record.recipe is not search.recipe:
                search.use_recipe(record.recipe)
            with bar(record.directory.name) as progress:
                figures = _recorded(search, record, progress)
            yield record.directory, figures


def _opened(recipes: Sequence[SearchRecipe]) -> Search | SearchWorkers:
    """A search with these recipes, in this process or in several, as the first recipe sets."""
    if recipes[0].processes > 1:
        return SearchWorkers(recipes)
    search = Search(recipes[0])
    try:
        for recipe in recipes:
            check_fits(search.scorer, recipe)
    except BaseException:
        search.close()
        raise
    return search


def _recorded(search: Search | SearchWorkers, record: Record, progress: Progress) -> dict[str, Any]:
    questions = search.questions()
    spent = _seconds_before(record.directory) if record.resume else 0.0
    began = time.monotonic()
    if search.recipe.search.method == "auto":
        choice = search.choose_method(questions, None if record.choice is None else record.choice["method"])
        if record.choice is None:
            record.chose(choice)
    waiting = [question for question in questions if question.index not in record.done]
    progress(len(record.done), len(questions))
    try:
        for line in search.lines(waiting):
            record.add(line)
            progress(len(record.done), len(questions))
    finally:
        figures = record.summarise(spent + time.monotonic() - began, search.phases, search.undecided)
    return figures


def _seconds_before(directory: Path) -> float:
    """The duration of earlier parts of this run."""
    path = directory / "summary.json"
    return float(json.loads(path.read_text()).get("seconds", 0.0)) if path.is_file() else 0.0
