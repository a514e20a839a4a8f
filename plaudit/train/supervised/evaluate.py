"""Evaluation of a trained model on held-out items and, in a world, against the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from plaudit.config import Regression
from plaudit.core import Engine, SamplingParams
from plaudit.train.supervised.examples import Comparison, Example, Rating, StepTargets
from plaudit.train.supervised.objectives import head_scores, pack_pairs, pack_rated, pack_steps
from plaudit.train.supervised.reader import Places, Reader
from plaudit.worlds import Sums, get_world
from plaudit.worlds.sums import judge

if TYPE_CHECKING:
    from plaudit.models import Loaded

Floats = np.ndarray[Any, Any]
E = TypeVar("E", Comparison, Rating, StepTargets)

MAX_ANSWER_TOKENS = 160
WORLDS = ("sums", "sums-hard")


def policy_accuracy(loaded: Loaded, world: Sums, problems: int, seed: int) -> dict[str, float]:
    """Return the accuracy on held-out problems: sampled at temperature 1, and greedy."""
    questions = world.heldout(problems)
    # The engine's seed, not the requests': with one seed for all requests the problems' samples would be correlated.
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


def evaluate_comparisons(reader: Reader, examples: Sequence[Example]) -> dict[str, float]:
    """Return the pair accuracy; a tie counts half."""
    chosen, rejected = _pair_scores(reader, examples)
    lead, both = chosen - rejected, np.concatenate([chosen, rejected])
    return {
        "pair_accuracy": float(np.mean((lead > 0) + 0.5 * (lead == 0))),
        "lead": float(lead.mean()),
        "score_mean": float(both.mean()),
        "score_std": float(both.std()),
    }


def evaluate_ratings(reader: Reader, examples: Sequence[Example], algorithm: Regression) -> dict[str, float]:
    """Return mean squared error and correlation per attribute, over the given ratings."""
    rated = _of(examples, Rating)
    scores = reader.read(
        rated,
        lambda part: pack_rated(reader, part),
        lambda _, at, hidden: head_scores(reader.model, at, hidden),
    )
    predicted, expected = scores.view(len(rated), -1).numpy(), np.array([e.ratings for e in rated])
    figures = {}
    for column, name in enumerate(algorithm.attributes):
        given = ~np.isnan(expected[:, column])
        x, y = predicted[given, column], expected[given, column]
        figures[f"{name}/mse"] = float(np.mean((x - y) ** 2)) if given.any() else float("nan")
        varied = given.sum() > 1 and x.std() > 0 and y.std() > 0
        figures[f"{name}/correlation"] = float(np.corrcoef(x, y)[0, 1]) if varied else float("nan")
    return figures


def evaluate_steps(reader: Reader, examples: Sequence[Example]) -> dict[str, float]:
    chances, expected = _step_chances(reader, examples)
    right, truth = np.concatenate(chances), np.concatenate(expected)
    return {"step_auc": auc(right, truth), "first_wrong_f1": first_wrong_f1(chances, expected)}


def accepted_errors(reader: Reader, examples: Sequence[Example]) -> float:
    """Return the fraction of wrong solutions that the reward model misses: pairs whose wrong response scores at least
    as high as the right one, or solutions whose first wrong step scores above 0.5."""
    if isinstance(examples[0], Comparison):
        chosen, rejected = _pair_scores(reader, examples)
        return float(np.mean(rejected >= chosen))
    solutions, expected = _step_chances(reader, examples)
    first_wrong = [chances[_first_false(truth)] for chances, truth in zip(solutions, expected, strict=True)]
    return float(np.mean(np.array(first_wrong) > 0.5))


def _pair_scores(reader: Reader, examples: Sequence[Example]) -> tuple[Floats, Floats]:
    """Scores of the chosen and of the rejected responses."""

    def scores(pairs: Sequence[Comparison], places: Places, hidden: Tensor) -> Tensor:
        return head_scores(reader.model, places, hidden)[:, 0].view(2, len(pairs)).T

    read = reader.read(_of(examples, Comparison), lambda pairs: pack_pairs(reader, pairs), scores)
    chosen, rejected = read.view(-1, 2).T.numpy()
    return chosen, rejected


def _step_chances(reader: Reader, examples: Sequence[Example]) -> tuple[list[Floats], list[Floats]]:
    """Return, for each solution, the probability that each step is right, and which steps are."""

    def chances(_: Sequence[StepTargets], places: Places, hidden: Tensor) -> Tensor:
        return head_scores(reader.model, places, hidden).softmax(-1)[:, 1]

    judged = _of(examples, StepTargets)
    read = reader.read(judged, lambda part: pack_steps(reader, part), chances).numpy()
    solutions = np.split(read, np.cumsum([len(e.ends) for e in judged])[:-1])
    return solutions, [np.array(e.targets) >= 0.5 for e in judged]


def auc(scores: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> float:
    """Return the probability that a true item scores above a false one; a tie counts half. NaN if a class is
    missing."""
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


def _of(examples: Sequence[Example], kind: type[E]) -> list[E]:
    return [example for example in examples if isinstance(example, kind)]
