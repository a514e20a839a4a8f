"""Step values by Monte Carlo: how often the policy reaches a correct answer from the end of each step. `plaudit steps`.

Every prefix of a dumped solution that ends with a step is completed several times by the policy that the run started
from. The mean reward of the completions is the step's value (Wang et al., Math-Shepherd, 2024: "soft estimation"); a
complete solution's value is its own reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe
from plaudit.config.prompting import SamplingTable
from plaudit.config.recipe import parse_recipe
from plaudit.config.rl import EnvironmentTable
from plaudit.config.table import read_toml
from plaudit.core import Engine
from plaudit.errors import DataError, RunError
from plaudit.models import choose_device, load_policy
from plaudit.output import check_writable, written
from plaudit.records import Prompt, Sample
from plaudit.train.data.answered import prompt_of
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.pairs import question_of
from plaudit.train.rollouts.rollouts import SampleScorer, sampling_params
from plaudit.train.rollouts.scorer import Scorer

Beginning = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a prompt, and of the steps so far


@dataclass(frozen=True, slots=True)
class Solution:
    """cuts   token counts at which its steps end, the last one aside where that is the solution's own end
    steps  their texts
    """

    sample: Sample
    cuts: tuple[int, ...]
    steps: tuple[str, ...]

    @property
    def beginnings(self) -> list[Beginning]:
        return [(self.sample.prompt_ids, self.sample.token_ids[:cut]) for cut in self.cuts]

    @property
    def finished(self) -> bool:
        return len(self.steps) > len(self.cuts)


@dataclass(slots=True)
class StepTally:
    solutions: int = 0
    unusable: int = 0
    """Solutions without a reward or a complete step, or with a token that spans the end of a step."""
    steps: int = 0
    completions: int = 0
    sum: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.solutions} solutions, mean value {self.sum / max(1, self.steps):.3f}, by "
            f"{self.completions} completions; {self.unusable} solutions could not be used"
        )


def write_step_values(run: Path, out: Path, *, split: str, completions: int, limit: int | None = None) -> StepTally:
    """Write the solutions of a run's rollouts as rows for `task = "prm"`. `split` ends a step."""
    check_writable(out)
    if not split:
        raise DataError("the text that ends a step is empty: set one")
    recipe, dump = _recipe(run), Dump.find(run)
    # Duplicate solutions to a prompt add no information.
    drawn = {(s.prompt_ids, s.token_ids): s for step in dump.steps() for s in dump.read(step)[0]}
    samples = list(drawn.values())[:limit]
    scorer = Scorer(recipe.reward)
    try:
        engine = _engine(recipe)
        cutter = Cutter(engine.tokenizer, engine.end_tokens, split)
        solutions = [solution for sample in samples if (solution := cutter(sample)) is not None]
        if not solutions:
            raise DataError(f"{dump.directory}: no solution of {len(samples)} has a step that ends with {split!r}")
        values = beginning_values(engine, scorer, recipe.sampling, recipe.seed, solutions, completions)
    finally:
        scorer.close()
    rows = [row_of(solution, values) for solution in solutions]
    with written(out) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    labels = [label for row in rows for label in row["labels"]]
    unusable = len(samples) - len(solutions)
    return StepTally(len(solutions), unusable, len(labels), completions * len(values), sum(labels))


def beginning_values(
    engine: Engine, scorer: SampleScorer, sampling: SamplingTable, seed: int, solutions: Sequence[Solution],
    completions: int,
) -> dict[Beginning, float]:  # fmt: skip
    """Return the mean reward of the completions of every distinct prefix, generated in one batch."""
    prompts = {begun: prompt_of(s.sample) for s in solutions for begun in s.beginnings}
    begun = list(prompts)
    params = [
        replace(
            sampling_params(sampling, completions, f"{seed} steps {index}"),
            max_tokens=max(1, sampling.max_tokens - len(beginning)),
        )
        for index, (_, beginning) in enumerate(begun)
    ]
    made = engine.generate([[*prompt, *beginning] for prompt, beginning in begun], params)
    rewards_of: dict[Beginning, list[float]] = {key: [] for key in begun}
    questions = [prompts[begun[sample.group]] for sample in made]
    for sample, reward in _rewards(scorer, questions, _whole(engine.tokenizer, begun, made)):
        rewards_of[begun[sample.group]].append(reward)
    for (_, beginning), rewards in rewards_of.items():
        if not rewards:
            raise RunError(
                f"no completion of {engine.tokenizer.decode(beginning)!r} has a reward: see the reward's errors"
            )
    return {key: sum(rewards) / len(rewards) for key, rewards in rewards_of.items()}


def row_of(solution: Solution, values: dict[Beginning, float]) -> dict[str, Any]:
    labels = [values[begun] for begun in solution.beginnings]
    if solution.finished:
        assert solution.sample.reward is not None
        labels.append(solution.sample.reward)
    for label in labels:
        if not 0 <= label <= 1:
            raise DataError(
                f"the value of a step is {label:g}, and a process model learns chances: the run's reward must be "
                "between 0 and 1, such as a rule's"
            )
    row = {**question_of(solution.sample), "steps": list(solution.steps), "labels": labels}
    return row if solution.finished else {**row, "finished": False}


class Cutter:
    """Splits samples into steps, by tokens and by text at the same places."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int], split: str) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.split = split
        self._piece = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    def __call__(self, sample: Sample) -> Solution | None:
        """Return the solution, or None if it is unusable: see `StepTally.unusable`."""
        if sample.reward is None or sample.finish_reason not in ("stop", "length"):
            return None
        response = tuple(token for token in sample.token_ids if token not in self.end_tokens)
        cuts, steps, before = [], [], ""
        for at, token in enumerate(response, 1):
            if self.split[-1] not in self._piece(token):
                continue
            text = self.tokenizer.decode(response[:at], skip_special_tokens=True)
            if text.endswith(self.split) and len(text) > len(before):
                cuts.append(at)
                steps.append(text[len(before) :])
                before = text
        rest = self.tokenizer.decode(response, skip_special_tokens=True)[len(before) :]
        if any(step.count(self.split) > 1 for step in steps) or self.split in rest:
            return None
        if rest and sample.finish_reason == "stop":
            steps.append(rest)
        return Solution(sample, tuple(cuts), tuple(steps)) if steps else None


def _rewards(
    scorer: SampleScorer, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> Iterator[tuple[Sample, float]]:
    """Return the samples that have a reward; duplicate responses to a prompt are scored once."""
    keys = [(p.token_ids, s.text, s.finish_reason) for p, s in zip(prompts, samples, strict=True)]
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    scored = scorer.score([prompts[i] for i in first.values()], [samples[i] for i in first.values()])
    rewards = {key: sample.reward for key, sample in zip(first, scored, strict=True)}
    for key, sample in zip(keys, samples, strict=True):
        if (reward := rewards[key]) is not None:
            yield sample, reward


def _whole(tokenizer: Any, begun: Sequence[Beginning], samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with the text of the whole response: the prefix and its completion."""
    texts = [tokenizer.decode(beginning, skip_special_tokens=True) for _, beginning in begun]
    return [replace(sample, text=texts[sample.group] + sample.text) for sample in samples]


def _recipe(run: Path) -> RlRecipe:
    path = run / "recipe.toml"
    recipe = parse_recipe(read_toml(path, "recipe of a run"), str(path))
    if not isinstance(recipe, RlRecipe):
        raise RunError(f"{run} is a run of task = {recipe.task!r}, which has no rollouts: give a run of task = 'rl'")
    if (other := recipe.environment or recipe.agent) is not None:
        name = other.name if isinstance(other, EnvironmentTable) else other.function
        raise RunError(f"{run} is multi-turn with {name!r}: step values need single-turn responses")
    return recipe


def _engine(recipe: RlRecipe) -> Engine:
    """Return an engine with the policy that sampled the solutions: the recipe's initial model."""
    assert recipe.model.path is not None
    loaded = load_policy(recipe.model.path, recipe.model.dtype, choose_device(recipe.model.device))
    table = recipe.engine
    return Engine(
        loaded.module, loaded.tokenizer, kv_bytes=table.kv_bytes, seed=recipe.seed, state_every=table.state_every
    )
