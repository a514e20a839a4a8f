"""Reward hacking is detected soon after it starts, with few false alarms."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from rich.console import Console

from plaudit.records import Sample
from plaudit.report.curve import Curve
from plaudit.report.history import History
from plaudit.report.live import LiveView
from plaudit.report.rules.integrity import GAMED, WATCHED
from plaudit.train.rollouts.batch_metrics import integrity
from tests.report.cases import CASES, NOISE, SEEDS, STEPS, Case
from tests.report.made_up import HEALTHY, HONEST, history

SHAPES = {name: {**HEALTHY, **HONEST}[name] for name in WATCHED}
GAMES = [case for case in CASES if case.name.startswith(("the reward pays for", "one answer"))]


def up_to(run: History, share: float) -> History:
    """The run up to the given share of its steps."""
    return replace(
        run,
        curves={
            name: Curve(c.steps[: round(share * len(c))], c.values[: round(share * len(c))])
            for name, c in run.curves.items()
        },
    )


def alarms(run: History) -> dict[str, int | None]:
    findings = [rule(run) for rule in GAMED]
    return {finding.rule: finding.step for finding in findings if finding is not None and finding.severity != "fine"}


@pytest.mark.parametrize("case", GAMES, ids=lambda case: case.name)
def test_reward_hacking_is_detected_within_a_tenth_of_the_steps(case: Case) -> None:
    for steps, noise, seed in product(STEPS, NOISE, SEEDS):
        run = history(SHAPES, steps, seed, noise, **case.shown)
        assert alarms(up_to(run, 0.5)) == {}, (steps, noise, seed)
        detected = alarms(up_to(run, 0.6))
        assert {*detected} == {case.name}, (steps, noise, seed)
        assert abs((detected[case.name] or 0) - steps / 2) <= steps / 10 + 1


def test_fewer_than_two_of_a_hundred_clean_runs_raise_an_alarm() -> None:
    """Each run is checked at four points. Half of them learn; the others do not, so that any alarm is possible."""
    still = {"accuracy": lambda x: 0.4, "reward__mean": lambda x: 0.4, "length__mean": lambda x: 20 + 4 * x}
    runs = [history(SHAPES, 120, seed, 0.1, **(still if seed % 2 else {})) for seed in range(100)]
    assert sum(any(alarms(up_to(run, tenth / 10)) for tenth in (4, 6, 8, 10)) for run in runs) < 2


def test_the_terminal_warns_once() -> None:
    console = Console(record=True, width=400)
    view, run = LiveView("run", console), history(SHAPES, 60, 1, 0.03, **GAMES[0].shown)
    for step in range(60):
        view.step(step + 1, {name: curve.values[step] for name, curve in run.curves.items()})
    output = console.export_text()
    assert output.count("the reward pays for length, since about step") == 1


def sample(group: int, ids: tuple[int, ...], text: str, reward: float) -> Sample:
    zeros = (0.0,) * len(ids)
    return Sample((1,), ids, text, zeros, zeros, (0,) * len(ids), (1,) * len(ids), "stop", group, 0, reward)


def test_integrity_metrics_by_hand() -> None:
    samples = [
        sample(0, (1, 2, 3, 4, 1, 2, 3, 4), "same", 1.0),  # five windows of four tokens, of which one is repeated
        sample(0, (5, 6, 7, 8), "other", 0.0),
        sample(1, (5, 6), "same", 2.0),
        sample(1, (5, 6, 7), "third", 1.0),
    ]
    metrics = integrity(samples)
    assert metrics == pytest.approx(
        {"response/repetition": 0.1, "response/common": 1.0, "reward/length_correlation": 0.0}
    )
    assert integrity([sample(0, (1,), "a", 1.0)]) == {}
