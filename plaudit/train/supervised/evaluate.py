"""What a trained model can do, measured on held-out items and, in a world, against the truth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from plaudit.config import Regression
from plaudit.core import Engine, SamplingParams
from plaudit.train.supervised.examples import Comparison, Example, Rating, StepTargets, micro_batches
from plaudit.train.supervised.objectives import outcome_scores, step_logits
from plaudit.worlds import Sums, get_world
from plaudit.worlds.sums import judge

if TYPE_CHECKING:
    from plaudit.models import Loaded

Floats = np.ndarray[Any, Any]
E = TypeVar("E", Comparison, Rating, StepTargets)

MAX_ANSWER_TOKENS = 160
WORLDS = ("sums", "sums-hard")


def policy_accuracy(loaded: Loaded, world: Sums, problems: int, seed: int) -> dict[str, float]:
    """The share of held-out problems answered right: sampled at temperature 1, and greedily."""
    questions = world.heldout(problems)
    # The engine's seed, not the requests': one seed for all of them would have all problems share their luck.
    engine = Engine(loaded.module, loaded.tokenizer, seed=seed)
    figures = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        params = SamplingParams(temperature=temperature, max_tokens=MAX_ANSWER_TOKENS)
        samples = engine.generate([problem.prompt for problem in questions], params)
        right = [judge(problem, sample.text).right for problem, sample in zip(questions, samples, strict=True)]
        figures[name] = float(np.mean(right))
    return figures


def evaluate_policy(loaded: Loaded, seed: int, problems: int, worlds: Sequence[str] = WORLDS) -> dict[str, float]:
    figures = {}
    for name in worlds:
        for how, share in policy_accuracy(loaded, get_world(name), problems, seed).items():
            figures[f"accuracy/{name}/{how}"] = share
    return figures


@torch.no_grad()
def evaluate_comparisons(model: nn.Module, examples: Sequence[Example], budget: int) -> dict[str, float]:
    """How many pairs are ordered as they should be; a tie is half right."""
    chosen, rejected = _pair_scores(model, examples, budget)
    lead, both = chosen - rejected, np.concatenate([chosen, rejected])
    return {
        "pair_accuracy": float(np.mean((lead > 0) + 0.5 * (lead == 0))),
        "lead": float(lead.mean()),
        "score_mean": float(both.mean()),
        "score_std": float(both.std()),
    }


@torch.no_grad()
def evaluate_ratings(
    model: nn.Module, examples: Sequence[Example], algorithm: Regression, budget: int
) -> dict[str, float]:
    """Mean squared error and correlation of each attribute, over the ratings that were given."""
    scores, ratings = [], []
    for micro in _of(examples, Rating, budget):
        scores.append(outcome_scores(model, [e.tokens for e in micro]).cpu().numpy())
        ratings += [e.ratings for e in micro]
    predicted, expected = np.concatenate(scores), np.array(ratings)
    figures = {}
    for column, name in enumerate(algorithm.attributes):
        rated = ~np.isnan(expected[:, column])
        x, y = predicted[rated, column], expected[rated, column]
        figures[f"{name}/mse"] = float(np.mean((x - y) ** 2)) if rated.any() else float("nan")
        varied = rated.sum() > 1 and x.std() > 0 and y.std() > 0
        figures[f"{name}/correlation"] = float(np.corrcoef(x, y)[0, 1]) if varied else float("nan")
    return figures


@torch.no_grad()
def evaluate_steps(model: nn.Module, examples: Sequence[Example], budget: int) -> dict[str, float]:
    chances, expected = _step_chances(model, examples, budget)
    right, truth = np.concatenate(chances), np.concatenate(expected)
    return {"step_auc": auc(right, truth), "first_wrong_f1": first_wrong_f1(chances, expected)}


@torch.no_grad()
def accepted_errors(model: nn.Module, examples: Sequence[Example], budget: int) -> float:
    """The share of wrong solutions that a judge does not see: a pair whose wrong response scores at least as high as
    the right one, steps of which the first wrong one is given more than 0.5."""
    if isinstance(examples[0], Comparison):
        chosen, rejected = _pair_scores(model, examples, budget)
        return float(np.mean(rejected >= chosen))
    solutions, expected = _step_chances(model, examples, budget)
    first_wrong = [chances[_first_false(truth)] for chances, truth in zip(solutions, expected, strict=True)]
    return float(np.mean(np.array(first_wrong) > 0.5))


def _pair_scores(model: nn.Module, examples: Sequence[Example], budget: int) -> tuple[Floats, Floats]:
    """Scores of the chosen and of the rejected responses."""
    chosen, rejected = [], []
    for micro in _of(examples, Comparison, budget):
        scores = outcome_scores(model, [e.chosen for e in micro] + [e.rejected for e in micro])[:, 0].cpu().numpy()
        chosen.append(scores[: len(micro)])
        rejected.append(scores[len(micro) :])
    return np.concatenate(chosen), np.concatenate(rejected)


def _step_chances(model: nn.Module, examples: Sequence[Example], budget: int) -> tuple[list[Floats], list[Floats]]:
    """For each solution, how likely each step is right, and which steps are."""
    solutions: list[Floats] = []
    expected: list[Floats] = []
    for micro in _of(examples, StepTargets, budget):
        chances = step_logits(model, [e.tokens for e in micro], [e.ends for e in micro]).softmax(-1)[:, 1].cpu().numpy()
        solutions += np.split(chances, np.cumsum([len(e.ends) for e in micro])[:-1])
        expected += [np.array(e.targets) >= 0.5 for e in micro]
    return solutions, expected


def auc(scores: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> float:
    """The chance that a true item scores above a false one; a tie is half. NaN if either kind is missing."""
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = counts.cumsum()
    rank = (last_rank - (counts - 1) / 2)[inverse]
    return float((rank[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def first_wrong_f1(chances_of: Sequence[np.ndarray[Any, Any]], truth: Sequence[np.ndarray[Any, Any]]) -> float:
    """ProcessBench's F1: harmonic mean of two accuracies, on solutions with an error (is the first wrong step found?)
    and on those without (is none claimed?). A step counts as wrong below 0.5."""
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for chances, right in zip(chances_of, truth, strict=True):
        hits[bool(right.all())].append(_first_false(chances >= 0.5) == _first_false(right))
    if not hits[True] or not hits[False]:
        return float("nan")
    sound, flawed = float(np.mean(hits[True])), float(np.mean(hits[False]))
    return 2 * sound * flawed / (sound + flawed) if sound + flawed else 0.0


def _first_false(flags: np.ndarray[Any, Any]) -> int:
    return -1 if flags.all() else int(np.argmin(flags))


def _of(examples: Sequence[Example], kind: type[E], budget: int) -> Iterator[list[E]]:
    for micro in micro_batches(examples, budget):
        yield [example for example in micro if isinstance(example, kind)]
