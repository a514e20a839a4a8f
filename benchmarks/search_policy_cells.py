"""Searches of benchmarks/search_policy_gpu.py: the pool from which best-of-n is drawn, trees, and their cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_grounds import ANSWER, GROUNDS, STOP, questions, split

from plaudit.config.search import PrmTable, SearchRecipe, parse_search
from plaudit.core import Engine, SamplingParams
from plaudit.search.backends.policy import CorePolicy
from plaudit.search.backends.scored import Path as ScoredPath
from plaudit.search.backends.scored import Scored, Scorer, items_of
from plaudit.search.backends.scoring import LocalScorer, open_scorer
from plaudit.search.questions.questions import Question, question
from plaudit.search.runner import Outcome
from plaudit.search.search import Search

TREES: dict[str, dict[str, Any]] = {
    "beam": {"method": "beam", "distinct": True},
    "dvts": {"method": "dvts"},
    "rebase": {"method": "rebase"},
    "rebase, T 1": {"method": "rebase", "temperature": 1.0},
    "ets": {"method": "ets", "clusters": "text"},
}
PATHS = 1024  # searched together by one process
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a process needs to search: created by the training part, the same in all."""

    directory: Path
    policy: str
    ground: str
    level: int
    pool: int
    count: int
    device: str
    dtype: str
    kv_bytes: int

    @property
    def tokens(self) -> int:
        ground = GROUNDS[self.ground]
        return ground.steps(self.level) * ground.step_tokens + 8


@dataclass(frozen=True, slots=True)
class Task:
    """`method` is a tree method, or "pool"; `prm` is "steps" (trained on exact labels), "values" (on completions) or
    "labels" (the exact labels themselves)."""

    method: str
    prm: str
    width: int
    first: int
    last: int


class Labels:
    """Exact step labels instead of a process model."""

    whole = False
    computed = 0

    def __init__(self, ground: str) -> None:
        self.ground = GROUNDS[ground]

    def score(self, paths: Sequence[ScoredPath], *, hidden: bool = False) -> list[Scored]:
        return [Scored(float(self.ground.labels(str(path.prompt), path.steps)[-1])) for path in paths]

    def release(self, places: Any) -> None:
        """Nothing to release."""

    def close(self) -> None:
        """Nothing to close."""


class Searcher:
    """The models of one process, and its searches."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.ground = setup, GROUNDS[setup.ground]
        self.engine = Engine.load(setup.policy, device=setup.device, dtype=setup.dtype, kv_bytes=setup.kv_bytes)
        self.scorers: dict[str, Scorer] = {"labels": Labels(setup.ground)}
        table = self.recipe("rebase", 4).data
        prompts = questions(self.ground, setup.level, setup.count, "search")
        self.questions: list[Question] = [
            question(i, {"prompt": text, "answer": "?"}, table, self.engine.tokenizer, f"question {i}")
            for i, text in enumerate(prompts)
        ]

    def recipe(self, method: str, width: int, lanes: int = 1) -> SearchRecipe:
        steps = self.setup.tokens
        rule = TREES.get(method, {"method": "best-of-n"})
        return parse_search(
            {"task": "search", "concurrent": max(1, lanes * PATHS // width), "lanes": lanes,
             "model": {"path": "policy"}, "prm": {"path": "prm"}, "data": {"path": "questions"},
             "steps": {"stop": STOP, "answer": ANSWER, "max_step_tokens": 16, "max_tokens": steps},
             "search": {"width": width, **rule}},
            "search_policy_gpu",
        )  # fmt: skip

    def scorer(self, prm: str) -> Scorer:
        if prm not in self.scorers:
            setup = self.setup
            path = setup.directory / f"prm-{prm}" / "final"
            self.scorers[prm] = open_scorer(
                PrmTable(path=str(path), dtype=setup.dtype, device=setup.device, kv_bytes=setup.kv_bytes)  # type: ignore[arg-type]
            )
        return self.scorers[prm]

    def run(self, task: Task) -> list[Row]:
        return self.pool(task) if task.method == "pool" else self.tree(task)[0]

    def tree(self, task: Task, lanes: int = 1) -> tuple[list[Row], dict[str, float]]:
        """A row per question, and seconds: in total and by phase."""
        recipe = self.recipe(task.method, task.width, lanes)
        policy = CorePolicy(self.engine, recipe.steps)
        search = Search(recipe, policy=policy, scorer=self.scorer(task.prm), tokenizer=self.engine.tokenizer)
        began = time.perf_counter()
        rows = [self.row(task, outcome) for outcome in search.run(self.questions[task.first : task.last])]
        spent = {"all": time.perf_counter() - began, **search.phases}
        for engine in (self.engine, getattr(search.scorer, "engine", None)):
            if engine is not None:
                engine.new_version()  # no cell reuses another's cache
        return rows, spent

    def row(self, task: Task, outcome: Outcome) -> Row:
        costs, answer = outcome.driver.costs, outcome.answer
        response = "" if answer is None else outcome.tree.response(answer.node)
        return {
            "method": task.method, "prm": task.prm, "width": task.width, "question": outcome.question.index,
            "right": self.ground.right(outcome.question.text, response), "generated": costs.generated,
            "kv_tokens": costs.kv_tokens, "kv_peak": costs.kv_peak, "prm_tokens": costs.prm_tokens,
            "calls": costs.calls, "solver": costs.solver, "clustering": costs.clustering,
        }  # fmt: skip

    def sampled(self, prompts: Sequence[Question], count: int, seed: int = 1) -> list[Any]:
        params = [
            SamplingParams(n=count, max_tokens=self.setup.tokens, seed=each.index + 1_000_000 * seed)
            for each in prompts
        ]
        return self.engine.generate([list(each.prompt_ids) for each in prompts], params)

    def pool(self, task: Task) -> list[Row]:
        """Whole responses, generated in one call and scored once by each process model."""
        chosen = self.questions[task.first : task.last]
        samples = self.sampled(chosen, task.width)
        texts = [sample.text for sample in samples]
        weights = {"labels": self.judged(chosen, samples, "labels")}
        prm_tokens = 0
        for prm in task.prm.split(","):
            before = self.scorer(prm).computed
            weights[prm] = self.judged(chosen, samples, prm)
            prm_tokens = prm_tokens or self.scorer(prm).computed - before
        rows = []
        for at, problem in enumerate(chosen):
            own = range(at * task.width, (at + 1) * task.width)
            paths = [split(texts[i]) for i in own]
            rows.append(
                {"method": "pool", "prm": task.prm, "width": task.width, "question": problem.index,
                 "answers": [texts[i].rpartition("#")[2] if "#" in texts[i] else "" for i in own],
                 "right": [self.ground.right(problem.text, texts[i]) for i in own],
                 "tokens": [len(samples[i].token_ids) for i in own],
                 "weights": {prm: [round(each[i], 6) for i in own] for prm, each in weights.items()},
                 "kv": {n: shared(paths[:n], len(problem.prompt_ids)) for n in (4, 16, 64) if n <= task.width},
                 "prm_tokens": prm_tokens / len(chosen) / task.width}
            )  # fmt: skip
        return rows

    def judged(self, chosen: Sequence[Question], samples: Sequence[Any], prm: str) -> list[float]:
        """The last step's score of each response; 0 where it is empty. Duplicates are scored once."""
        scorer, keys = self.scorer(prm), [(chosen[s.group].text, s.text) for s in samples]
        once = [key for key in dict.fromkeys(keys) if key[1]]
        paths = [ScoredPath(prompt, tuple(split(text))) for prompt, text in once]
        if isinstance(scorer, LocalScorer):
            values = whole_scores(scorer, paths)
        else:
            values = [result.value or 0.0 for result in scorer.score(paths)]
        scores = dict(zip(once, values, strict=True))
        return [scores.get(key, 0.0) for key in keys]


def whole_scores(scorer: LocalScorer, paths: Sequence[ScoredPath]) -> list[float]:
    """Scores complete responses: packed and without a cache, which is the fastest way."""
    items = items_of(paths)
    scorer.reading.prerender(items)
    works = [replace(work, positions=work.positions[-1:], steps=1) for work in map(scorer.reading.prepare, items)]
    rows = scorer.engine.score(
        [work.tokens for work in works], positions=[work.positions for work in works], columns=works[0].columns
    )
    return [scorer.reading.finish(work, row).values[-1] for work, row in zip(works, rows, strict=True)]


def shared(paths: Sequence[Sequence[str]], prompt: int) -> int:
    """KV tokens shared by these paths, counted as a search does: at every level, those of distinct prefixes of the
    paths that are open there."""
    total = prompt  # the first level has only the prompt
    deepest = max(map(len, paths))
    for depth in range(1, deepest):
        live = [path for path in paths if len(path) > depth]
        beginnings = {tuple(path[:at]) for path in live for at in range(1, depth + 1)}
        total += prompt + sum(len(each[-1]) for each in beginnings)
    return total
