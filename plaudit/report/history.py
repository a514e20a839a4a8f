"""The history of a run, in the form used by all views."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plaudit.events import CHANGED, END, START, Event
from plaudit.report.certificate import proof, verdict_of
from plaudit.report.curve import Curve
from plaudit.report.memory import Timeline, timelines
from plaudit.report.source import run_events

HELD_OUT = "heldout/"
_REST = "other"
# Descriptions of held-out figures, in display order.
FIGURES = {
    "accuracy": "answers right",
    "truth": "true reward",
    "truth_se": "standard error of the true reward",
    "reward": "reward",
    "reward/rule": "of it from [reward]",
    "turns/reward": "of it from the environment",
    "pass_at_k": "prompts with an answer that is right",
    "accuracy/sums/sampled": "answers right, sampled at temperature 1",
    "accuracy/sums/greedy": "answers right, greedy",
    "accuracy/sums-hard/sampled": "long chains right, sampled",
    "accuracy/sums-hard/greedy": "long chains right, greedy",
    "pair_accuracy": "pairs ordered as the truth orders them",
    "step_auc": "right steps scored above wrong ones (AUC)",
    "first_wrong_f1": "first wrong step found (F1)",
    "sums-hard/pair_accuracy": "pairs of long chains ordered as the truth orders them",
    "sums-hard/step_auc": "steps of long chains (AUC)",
    "sums-hard/first_wrong_f1": "first wrong step of long chains (F1)",
    "label_auc": "desirable responses above undesirable ones (AUC)",
    "drift": "distance from the reference",
    "lead": "mean lead of the better response",
    "score_mean": "mean score",
    "score_std": "spread of scores",
    "heldout_loss": "loss on held-out items",
}


@dataclass(frozen=True, slots=True)
class History:
    """task, algorithm, planned_steps, clip_norm and grouped come from the recipe, if the run logged it."""

    name: str
    curves: Mapping[str, Curve]
    seconds: float = 0.0
    spans: Mapping[str, float] = field(default_factory=dict)
    memory: Sequence[Timeline] = ()
    samples: Sequence[Event] = ()
    task: str | None = None
    algorithm: str | None = None
    planned_steps: int | None = None
    clip_norm: float | None = None
    grouped: bool | None = None
    """Whether a response is only compared with others to the same prompt."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """The sampling of held-out prompts: how many, samples of each, temperature, top_p, top_k, max_tokens; the number of
    held-out items of a run that learns from examples."""
    changes: Sequence[Event] = ()
    """Settings changed when the run was resumed."""
    finished: bool = False
    """Whether its last process finished; otherwise it is still running, or was stopped."""
    proof: Sequence[str] = ()
    """Its hashes, and the result of `plaudit verify`, as text."""

    @property
    def steps(self) -> int:
        return max((curve.steps[-1] for curve in self.curves.values() if curve.steps), default=0)

    @property
    def reinforced(self) -> bool:
        """Whether this is an RL run; otherwise it learned from examples."""
        return "reward/mean" in self.curves

    @property
    def right(self) -> Curve | None:
        """The share of samples that are right, if known."""
        return self.curve("accuracy", f"{HELD_OUT}accuracy")

    @property
    def level(self) -> float | None:
        """The quality of the samples at the end, from 0 to 1: the share that is right, otherwise the position of the
        mean reward between the minimum and the maximum; None if rewards never differed."""
        if right := self.right:
            return right.late()
        mean, greatest, least = self.curve("reward/mean"), self.curve("reward/max"), self.curve("reward/min")
        if mean is None or greatest is None or least is None:
            return None
        bottom, top = min(least.finite), max(greatest.finite)
        if bottom >= 0 and top <= 1:  # typical rewards of rules: if none reached 1, the maximum seen says little
            return mean.late()
        return (mean.late() - bottom) / (top - bottom) if top > bottom else None

    @property
    def truth(self) -> Curve | None:
        """The share of samples that are right, if the world knows it; otherwise the value of the recipe's [truth]."""
        return self.curve("accuracy", f"{HELD_OUT}accuracy", f"{HELD_OUT}truth")

    @property
    def saturated(self) -> bool:
        """Whether the mean reward is within a thirtieth of the range from the maximum reward seen."""
        mean, greatest, least = self.curve("reward/mean"), self.curve("reward/max"), self.curve("reward/min")
        if mean is None or greatest is None:
            return False
        top = max(greatest.finite)
        bottom = min(least.finite) if least else min(mean.finite)
        return top > bottom and top - mean.late() <= (top - bottom) / 30

    def curve(self, *names: str) -> Curve | None:
        """The first of these curves that has a finite value."""
        return next((curve for name in names if (curve := self.curves.get(name)) and curve.finite), None)

    def held_out(self) -> dict[str, Curve]:
        return {name.removeprefix(HELD_OUT): c for name, c in self.curves.items() if name.startswith(HELD_OUT)}

    def evaluated(self) -> str:
        """How its held-out figures were sampled, as text; "" if not logged."""
        how = self.evaluation
        if "prompts" not in how:
            return ""
        limits = [f"top_p {how['top_p']:g}"] if how["top_p"] < 1 else []
        limits += [f"top_k {how['top_k']:g}"] if how["top_k"] else []
        drawn = "greedy" if how["temperature"] == 0 else ", ".join([f"temperature {how['temperature']:g}", *limits])
        answers = "1 response" if how["samples"] == 1 else f"{how['samples']} responses"
        return f"{how['prompts']:,} prompts, {answers} to each: {drawn}, at most {how['max_tokens']:,} tokens"

    def phases(self) -> dict[str, list[tuple[int, float]]]:
        """(step, seconds) of every phase of a step; the time outside all phases is `other`. Longest phase first."""
        phases = {
            name.removeprefix("time/"): [(s, v) for s, v in zip(c.steps, c.values, strict=True) if math.isfinite(v)]
            for name, c in self.curves.items()
            if name.startswith("time/") and name != "time/step"
        }
        if whole := self.curves.get("time/step"):
            timed: dict[int, float] = {}
            for points in phases.values():
                for step, seconds in points:
                    timed[step] = timed.get(step, 0.0) + seconds
            rest = [(s, max(0.0, v - timed.get(s, 0.0))) for s, v in zip(whole.steps, whole.values, strict=True)]
            phases[_REST] = [(step, seconds) for step, seconds in rest if math.isfinite(seconds)]
        lasted = {name: points for name, points in phases.items() if any(seconds > 0 for _, seconds in points)}
        return dict(sorted(lasted.items(), key=lambda item: -sum(seconds for _, seconds in item[1])))

    def time_split(self) -> dict[str, float]:
        """Seconds of every phase over the run, longest first; the spans of a run without `time/` figures."""
        split = {name: sum(seconds for _, seconds in points) for name, points in self.phases().items()}
        return split or dict(sorted(self.spans.items(), key=lambda item: -item[1]))


def read_history(run: Path) -> History:
    history = history_of(run.resolve().name, run_events(run))
    verified = verdict_of(run)
    return replace(history, proof=[*history.proof, verified]) if verified else history


def history_of(name: str, events: Sequence[Event]) -> History:
    points: dict[str, dict[int, float]] = {}
    spans: dict[str, float] = {}
    plan: Event = {}
    changes: list[Event] = []
    finished = False
    for event in events:
        if event["kind"] == "plan":
            plan = event
        elif event["kind"] == "note" and "role" not in event and event["text"] in (START, END):
            finished = event["text"] == END
        elif event["kind"] == "note" and event["text"] == CHANGED:
            changes.append(event)
        elif event["kind"] == "metric" and "step" in event:
            for metric, value in event["values"].items():
                points.setdefault(metric, {})[event["step"]] = float(value)
        elif event["kind"] == "span":
            spans[event["name"]] = spans.get(event["name"], 0.0) + float(event["seconds"])
    curves = {}
    for metric, by_step in points.items():
        steps = sorted(by_step)
        curves[metric] = Curve(tuple(steps), tuple(by_step[step] for step in steps))
    return History(
        name=name,
        curves=curves,
        seconds=float(events[-1]["wall"]) - float(events[0]["wall"]) if events else 0.0,
        spans=spans,
        memory=timelines(
            [event for event in events if event["kind"] == "memory"],
            [event for event in events if event["kind"] == "plan"],
        ),
        samples=[event for event in events if event["kind"] == "sample"],
        task=plan.get("task"),
        algorithm=plan.get("algorithm"),
        planned_steps=plan.get("steps"),
        clip_norm=plan.get("clip_norm"),
        grouped=plan.get("grouped"),
        evaluation=plan.get("evaluation", {}),
        changes=changes,
        finished=finished,
        proof=[words] if (words := proof(events, curves.get("mismatch/abs_max"))) else (),
    )
