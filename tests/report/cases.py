"""Synthetic runs for each diagnosis of the report: runs that show the problem, and similar ones that do not.
`docs/diagnoses.py` and the tests count the results. Every case has two lengths, two noise levels and several seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from plaudit.report.curve import Curve
from plaudit.report.diagnosis import diagnose
from plaudit.report.history import History
from plaudit.report.memory import timelines
from tests.report.made_up import ASYNCHRONOUS, CRITIC, HEALTHY, HONEST, Shape, history

STEPS, NOISE, SEEDS = (40, 120), (0.03, 0.1), range(3)
WATCHED = {**HEALTHY, **HONEST}
EVERYTHING = {**HEALTHY, **CRITIC, **ASYNCHRONOUS}
EXAMPLES: Mapping[str, Shape] = {
    "loss": lambda x: 0.5 + 1.5 * math.exp(-4 * x), "grad_norm": lambda x: 0.8, "lr": lambda x: 1e-3,
    "heldout/heldout_loss": lambda x: 0.7 + 1.3 * math.exp(-4 * x),
}  # fmt: skip
CONTROLS: Mapping[str, Mapping[str, Shape]] = {
    "GRPO": HEALTHY, "GRPO with figures of integrity": WATCHED, "PPO": {**HEALTHY, **CRITIC}, "async": EVERYTHING,
    "on examples": EXAMPLES,
}  # fmt: skip


def flat(value: float) -> Shape:
    return lambda x: value


def spike(height: float) -> Shape:
    return lambda x: height if abs(x - 0.5) < 1e-9 else 0.5


def gamed(x: float) -> float:
    """Rises from 0 to 1 within a twelfth of the run, starting at its middle."""
    return min(1.0, max(0.0, 12 * (x - 0.5)))


class Case(NamedTuple):
    """shown, near   metrics that differ from a healthy run, with __ for /, in runs with and without the problem
    make          further changes to a run; its second argument is whether the run has the problem
    """

    name: str
    shown: Mapping[str, Shape]
    near: Mapping[str, Shape]
    base: Mapping[str, Shape] = HEALTHY
    make: Callable[[History, bool], History] = lambda run, shows: run


def _changed(run: History, shows: bool) -> History:
    note: dict[str, Any] = {"key": "train.lr", "old": 1e-4, "new": 1e-5, "step": 20}
    return replace(run, changes=[note] if shows else [])


def _filled(run: History, shows: bool) -> History:
    used = 95 if shows else 70
    event: dict[str, Any] = {
        "kind": "memory", "wall": 0.0, "step": 1, "phase": "update", "seconds": 1.0, "bytes": {"weights": used},
        "start": {}, "end": {}, "capacity": 100,
    }  # fmt: skip
    return replace(run, memory=timelines([event], []))


def _evaluated(run: History, shows: bool) -> History:
    """Four evaluations of the held-out loss."""
    curve = run.curves["heldout/heldout_loss"]
    places = [len(curve) * quarter // 4 - 1 for quarter in range(1, 5)]
    seldom = Curve(tuple(curve.steps[i] for i in places), tuple(curve.values[i] for i in places))
    return replace(run, curves={**run.curves, "heldout/heldout_loss": seldom})


def _truth(run: History, shows: bool) -> History:
    """Truth from the recipe's [truth] table: eight evaluations, and no truth from a world."""
    curves = {name: curve for name, curve in run.curves.items() if name != "accuracy"}
    places = [len(curves["reward/mean"]) * eighth // 8 - 1 for eighth in range(1, 9)]
    for name in ("heldout/truth", "heldout/truth_se", "heldout/reward"):
        curves[name] = Curve(
            tuple(curves[name].steps[i] for i in places), tuple(curves[name].values[i] for i in places)
        )
    return replace(run, curves=curves)


HELD_TRUTH: Mapping[str, Shape] = {
    **HEALTHY, "heldout/reward": lambda x: 0.3 + 0.45 * x, "heldout/truth": lambda x: 0.3 + 0.4 * x,
    "heldout/truth_se": flat(0.02),
}  # fmt: skip
STILL = {"reward__mean": flat(0.4), "accuracy": flat(0.4)}

CASES = (
    Case("a number that is none", {"policy__loss": lambda x: math.nan if x > 0.5 else 0.0}, {"policy__loss": flat(5)}),
    Case("settings changed on resumption", {}, {}, make=_changed),
    Case("over-optimisation", {"accuracy": lambda x: 0.4 + 0.8 * min(x, 1 - x)},
         {"accuracy": lambda x: 0.4 + 0.4 * min(x, 0.5)}),
    Case("over-optimisation", {"heldout__truth": lambda x: 0.4 + 0.8 * min(x, 1 - x)},
         {"heldout__truth": lambda x: 0.4 + 0.4 * min(x, 0.5)}, HELD_TRUTH, _truth),
    Case("reward without truth", {"accuracy": flat(0.4)}, {"accuracy": lambda x: 0.3 + 0.3 * x}),
    Case("the reward pays for length",
         {"length__mean": lambda x: 20 * (1 + gamed(x)), "reward__length_correlation": lambda x: 0.1 + 0.6 * gamed(x),
          "accuracy": flat(0.4)},
         {"length__mean": lambda x: 20 * (1 + gamed(x)), "reward__length_correlation": lambda x: 0.1 + 0.6 * gamed(x)},
         WATCHED),
    Case("the reward pays for brevity",
         {"length__mean": lambda x: 20 - 17 * gamed(x), "reward__length_correlation": lambda x: 0.1 - 0.6 * gamed(x),
          "accuracy": flat(0.4)},
         {"length__mean": lambda x: 20 - 17 * gamed(x), "reward__length_correlation": lambda x: 0.1 - 0.6 * gamed(x)},
         WATCHED),
    Case("the reward pays for repetition",
         {"response__repetition": lambda x: 0.06 + 0.4 * gamed(x), "accuracy": flat(0.4)},
         {"response__repetition": lambda x: 0.06 + 0.05 * gamed(x), "accuracy": flat(0.4)}, WATCHED),
    Case("one answer for many prompts", {"response__common": lambda x: 0.05 + 0.6 * gamed(x), "accuracy": flat(0.4)},
         {"response__common": lambda x: 0.05 + 0.08 * gamed(x), "accuracy": flat(0.4)}, WATCHED),
    Case("equal rewards within groups", {"reward__zero_std_groups": flat(0.65)},
         {"reward__zero_std_groups": flat(0.4)}),
    Case("nothing learned", {"reward__mean": flat(0.4)}, {"reward__mean": lambda x: 0.3 + 0.2 * x}),
    Case("nothing learned", {"loss": flat(2)}, {"loss": lambda x: 2 - 0.6 * x}, EXAMPLES),
    Case("hardly learned", {"heldout__pair_accuracy": flat(0.72)},
         {"heldout__pair_accuracy": lambda x: 0.6 + 0.2 * x}, EXAMPLES),
    Case("no better than chance", {"heldout__pair_accuracy": flat(0.51)},
         {"heldout__pair_accuracy": lambda x: 0.6 + 0.3 * x}, EXAMPLES),
    Case("the reward falls", {"reward__mean": lambda x: 0.7 - 0.3 * x}, {"reward__mean": flat(0.7)}),
    Case("a dip at the start", {"reward__mean": lambda x: max(0.6 - 4 * x, 0.3 + x / 2)},
         {"reward__mean": lambda x: max(0.33 - x, 0.3 + x / 2)}),
    Case("saturated reward", {name: lambda x: 1 - 0.5 * math.exp(-9 * x) for name in ("reward__mean", "accuracy")},
         {name: lambda x: 0.9 - 0.5 * math.exp(-9 * x) for name in ("reward__mean", "accuracy")}),
    Case("the same low reward for all",
         {"reward__mean": flat(0.2), "reward__max": flat(0.2), "accuracy": flat(0.1)},
         {"reward__mean": flat(0.2), "reward__max": flat(1.0), "accuracy": flat(0.1)}),
    Case("reward errors", {"reward__errors": flat(0.05)}, {"reward__errors": flat(0.005)}),
    Case("entropy collapse", {"policy__entropy": lambda x: 0.8 * math.exp(-8 * x)},
         {"policy__entropy": lambda x: 0.8 * (1 - 0.7 * x)}),
    Case("entropy falls", {"policy__entropy": lambda x: 0.8 * (1 - 0.85 * x)},
         {"policy__entropy": lambda x: 0.8 * (1 - 0.5 * x)}),
    Case("entropy grows", {"policy__entropy": lambda x: 0.8 + 2 * x}, {"policy__entropy": lambda x: 0.8 + 0.5 * x}),
    Case("KL grows without reward", {"kl__reference": lambda x: 0.02 + x * x, **STILL},
         {"kl__reference": lambda x: 0.02 + x * x}),
    Case("exploding gradient", {"policy__grad_norm": lambda x: 0.5 * math.exp(6 * x)},
         {"policy__grad_norm": lambda x: 0.5 * math.exp(1.5 * x)}),
    Case("a spike of the gradient", {"policy__grad_norm": spike(20)}, {"policy__grad_norm": spike(5)}),
    Case("too much clipping", {"policy__clip_high": flat(0.25)}, {"policy__clip_high": flat(0.15)}),
    Case("tiny updates", {"policy__updates": flat(4)}, {"policy__updates": flat(4), "policy__kl_old": flat(1e-3)}),
    Case("ratio far from 1", {"policy__updates": flat(1), "policy__kl_old": flat(0.02)},
         {"policy__updates": flat(4), "policy__kl_old": flat(0.02)}),
    Case("no gradient", {"policy__grad_norm": flat(0)}, {"policy__grad_norm": flat(1e-4)}),
    Case("still warming up", {"policy__lr": lambda x: x}, {"policy__lr": lambda x: min(x, 0.8)}),
    Case("too few turns", {"turns__out_of_turns": flat(0.2)}, {"turns__out_of_turns": flat(0.05)}),
    Case("cut-off samples", {"length__truncated": flat(0.15)}, {"length__truncated": flat(0.07)}),
    Case("length without reward", {"length__mean": lambda x: 18 * 3**x, "reward__mean": flat(0.4)},
         {"length__mean": lambda x: 18 * 3**x}),
    Case("samples shrink", {"length__mean": lambda x: 40 * 0.2**x}, {"length__mean": lambda x: 40 * 0.6**x}),
    Case("mismatch", {"mismatch__abs_mean": flat(0.005)}, {"mismatch__abs_mean": flat(5e-4)}),
    Case("mismatch", {"mismatch__abs_mean": flat(0.05)}, {"mismatch__abs_mean": flat(5e-4)}, EVERYTHING),
    Case("mismatch too large", {"mismatch__abs_mean": flat(0.08)}, {"mismatch__abs_mean": flat(0.01)}),
    Case("few effective samples", {"mismatch__ess": flat(0.5)}, {"mismatch__ess": flat(0.85)}),
    Case("samples too old", {"rollout__dropped": lambda x: round(40 * x)}, {}, EVERYTHING),
    Case("values beyond rewards", {"value__mean": lambda x: 7 * x}, {"value__mean": lambda x: 1.5 * x}, EVERYTHING),
    Case("useless critic", {"value__explained_variance": flat(-0.1)}, {"value__explained_variance": flat(0.15)},
         EVERYTHING),
    Case("generate takes most of the time", {"time__generate": flat(8), "time__step": flat(10)},
         {"time__generate": flat(1.3), "time__step": flat(2.8)}),
    Case("tools takes most of the time", {"time__tools": flat(8), "time__step": flat(11)},
         {"time__tools": flat(1), "time__step": flat(3.8)}),
    Case("memory nearly full", {}, {}, make=_filled),
    Case("overfitting", {"heldout__heldout_loss": lambda x: 0.7 + 2 * (x - 0.4) ** 2},
         {"heldout__heldout_loss": lambda x: 0.7 + 1.3 * math.exp(-4 * x)}, EXAMPLES, _evaluated),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Count:
    """shown, hits   runs with the problem, and those of them with the diagnosis
    quiet, false   runs without it (similar and healthy ones), and those of them with the diagnosis"""

    shown: int = 0
    hits: int = 0
    quiet: int = 0
    false: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, name) + getattr(other, name) for name in ("shown", "hits", "quiet", "false")))


def counts() -> dict[str, Count]:
    """The counts of every diagnosis of severity bad or watch."""
    by_rule: dict[str, Count] = {}
    healthy = [reported(run) for shapes in CONTROLS.values() for run in _runs(shapes, {}, range(10))]
    for case in CASES:
        shown = [reported(case.make(run, True)) for run in _runs(case.base, case.shown)]
        near = [reported(case.make(run, False)) for run in _runs(case.base, case.near)]
        hits, false = (sum(case.name in names for names in runs) for runs in (shown, near))
        by_rule[case.name] = by_rule.get(case.name, Count()) + Count(len(shown), hits, len(near), false)
    for name, count in by_rule.items():
        by_rule[name] = count + Count(quiet=len(healthy), false=sum(name in names for names in healthy))
    return by_rule


def reported(run: History) -> set[str]:
    return {finding.rule for finding in diagnose(run) if finding.severity != "fine"}


def _runs(shapes: Mapping[str, Shape], changed: Mapping[str, Shape], seeds: range = SEEDS) -> Iterator[History]:
    for steps, noise, seed in product(STEPS, NOISE, seeds):
        yield history(shapes, steps, seed, noise, **changed)


def table() -> str:
    """The table in docs/report.md."""
    lines = ["| diagnosis | reported where it should be | reported where it should not be |", "| --- | --- | --- |"]
    for name, count in counts().items():
        lines.append(f"| {name} | {_rate(count.hits, count.shown)} | {_rate(count.false, count.quiet)} |")
    return "\n".join(lines) + "\n"


def _rate(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)"
