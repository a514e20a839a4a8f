"""Each rule on synthetic runs: it reports a problem with the numbers where it should, and none where it should not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.events import RESUME, EventLog
from plaudit.report.curve import Curve
from plaudit.report.diagnosis import RULES, diagnose, verdict
from plaudit.report.history import History, read_history
from tests.report.made_up import ASYNCHRONOUS, CRITIC, HEALTHY, Shape, history, write_run

EVERYTHING = {**HEALTHY, **CRITIC, **ASYNCHRONOUS}


def flat(value: float) -> Shape:
    return lambda x: value


def spoken(run: History, severity: str) -> dict[str, str]:
    return {found.rule: f"{found.says} {found.cure}" for found in diagnose(run) if found.severity == severity}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shapes", [HEALTHY, EVERYTHING], ids=["grpo", "ppo"])
def test_a_healthy_run_is_said_to_be_healthy(shapes: dict[str, Shape], seed: int) -> None:
    run = history(shapes, seed=seed)
    findings = diagnose(run)
    assert {found.severity for found in findings} == {"fine"}
    assert len(findings) >= 18
    severity, told = verdict(run, findings)
    assert severity == "fine"
    assert told.startswith("Healthy. Reward 0.3")
    assert told.endswith("over 120 steps.")


@pytest.mark.parametrize(
    ("severity", "rule", "words", "changed"),
    [
        ("bad", "equal rewards within groups", "92 % of groups", {"reward__zero_std_groups": flat(0.92)}),
        ("watch", "equal rewards within groups", "dynamic sampling", {"reward__zero_std_groups": flat(0.65)}),
        ("bad", "entropy collapse", "0.0", {"policy__entropy": lambda x: 0.8 * math.exp(-8 * x)}),
        ("watch", "entropy falls", "explores less", {"policy__entropy": lambda x: 0.8 * (1 - 0.85 * x)}),
        ("watch", "entropy grows", "more random", {"policy__entropy": lambda x: 0.8 + 2 * x}),
        ("watch", "KL grows without reward", "without getting better",
         {"kl__reference": lambda x: 0.02 + x * x, "reward__mean": lambda x: 0.3 + 0.45 * min(x, 0.3)}),
        ("bad", "over-optimisation", "Since step 6",
         {"accuracy": lambda x: 0.4 + 0.4 * (x if x < 0.5 else 1 - x)}),
        ("watch", "reward without truth", "reward the wrong thing", {"accuracy": flat(0.4)}),
        ("watch", "nothing learned", "No learning beyond chance", {"reward__mean": flat(0.4)}),
        ("bad", "the reward falls", "gets worse", {"reward__mean": lambda x: 0.7 - 0.3 * x}),
        ("watch", "a dip at the start", "warm up", {"reward__mean": lambda x: max(0.6 - 4 * x, 0.3 + x / 2)}),
        ("watch", "saturated reward", "harder prompts",
         {"reward__mean": lambda x: 1 - 0.5 * math.exp(-9 * x), "accuracy": lambda x: 1 - 0.5 * math.exp(-9 * x)}),
        ("watch", "cut-off samples", "20 %", {"length__truncated": flat(0.2)}),
        ("bad", "cut-off samples", "token limit", {"length__truncated": flat(0.5)}),
        ("watch", "length without reward", "20 →", {"length__mean": lambda x: 18 * 3**x, "reward__mean": flat(0.4)}),
        ("watch", "samples shrink", "gives up", {"length__mean": lambda x: 40 * 0.2**x}),
        ("bad", "exploding gradient", "grew from", {"policy__grad_norm": lambda x: 0.5 * math.exp(6 * x)}),
        ("bad", "a number that is none", "first at step 61", {"policy__loss": lambda x: math.nan if x > 0.5 else 0.0}),
        ("bad", "a number that is none", "grad_norm", {"policy__grad_norm": lambda x: math.inf if x > 0.9 else 1.0}),
        ("watch", "too much clipping", "25 %", {"policy__clip_high": flat(0.25)}),
        ("bad", "too much clipping", "discarded", {"policy__clip_low": flat(0.25), "policy__clip_high": flat(0.2)}),
        ("watch", "tiny updates", "Raise train.lr", {"policy__updates": flat(4)}),
        ("bad", "ratio far from 1", "at the first step", {"policy__ratio_mean": flat(1.4)}),
        ("bad", "ratio far from 1", "with one update per batch",
         {"policy__updates": flat(1), "policy__kl_old": flat(0.02)}),
        ("watch", "mismatch", "usual in bfloat16", {"mismatch__abs_mean": flat(0.005)}),
        ("bad", "mismatch too large", "stale weights", {"mismatch__abs_mean": flat(0.08)}),
        ("watch", "few effective samples", "50 %", {"mismatch__ess": flat(0.5)}),
        ("bad", "few effective samples", "a few samples dominate", {"mismatch__ess": flat(0.1)}),
        ("watch", "reward errors", "5", {"reward__errors": flat(0.05)}),
        ("bad", "reward errors", "20 %", {"reward__errors": flat(0.2)}),
        ("watch", "generate takes most of the time", "% of the time goes to generate",
         {"time__generate": flat(8), "time__step": flat(10)}),
        ("bad", "no gradient", "nothing is trained", {"policy__grad_norm": flat(0)}),
        ("fine", "loss of 0", "normal with one update per batch", {}),
        ("watch", "still warming up", "still rising", {"policy__lr": lambda x: x}),
        ("bad", "values beyond rewards", "algorithm.bootstrap",
         {"value__mean": lambda x: 7 * x, "length__truncated": flat(0.5)}),
        ("bad", "values beyond rewards", "algorithm.bootstrap",
         {"value__mean": lambda x: -9 * x, "length__truncated": flat(0.5)}),
        ("bad", "values beyond rewards", "critic.lr", {"value__mean": lambda x: 7 * x, "length__truncated": flat(0)}),
        ("watch", "useless critic", "explains nothing", {"value__explained_variance": flat(-0.1)}),
        ("bad", "useless critic", "group baseline", {"value__explained_variance": flat(-2)}),
        ("watch", "samples too old", "dropped", {"staleness__max": flat(4), "rollout__dropped": lambda x: 360 * x}),
        ("fine", "staleness at its bound", "bound is 4",
         {"staleness__max": flat(4.2), "rollout__staleness_bound": flat(4)}),
        ("watch", "mismatch", "versions old", {"mismatch__abs_mean": flat(0.05), "staleness__mean": flat(1.5)}),
    ],
)  # fmt: skip
def test_a_rule_speaks(severity: str, rule: str, words: str, changed: dict[str, Shape]) -> None:
    run = history(**changed)
    # A bound is what the recipe says, not something measured.
    run = replace(run, curves={name: exact(curve) if "bound" in name or "updates" in name else curve
                               for name, curve in run.curves.items()})  # fmt: skip
    said = spoken(run, severity)
    assert rule in said, [(found.severity, found.rule) for found in diagnose(run)]
    assert words in said[rule]
    if severity != "fine":
        assert rule not in spoken(history(EVERYTHING), severity)
        assert verdict(run, diagnose(run))[0] in ("bad", severity)


# Equal rewards within groups: what helps depends on how good the samples are


def test_equal_groups_matter_where_responses_are_compared_within_them() -> None:
    """PPO's critic and REINFORCE's returns give a gradient whatever the others of a group got."""
    equal = history(HEALTHY, reward__zero_std_groups=flat(0.9))
    rule = "equal rewards within groups"
    assert rule in spoken(equal, "bad")
    assert rule in spoken(replace(equal, grouped=True), "bad")
    assert rule not in spoken(replace(equal, grouped=False), "bad")
    assert rule not in spoken(history({**HEALTHY, **CRITIC}, reward__zero_std_groups=flat(0.9)), "bad")


EQUAL = {"reward__zero_std_groups": flat(0.9)}


def equal_cure(run: History) -> str:
    return next(found.cure for found in diagnose(run) if found.rule == "equal rewards within groups")


@pytest.mark.parametrize(
    ("level", "helps", "hurts"),
    [(0.05, "easier", "harder"), (0.2, "easier", "harder"), (0.75, "harder", "easier"), (0.97, "harder", "easier")],
)
@pytest.mark.parametrize("known", ["answers", "rewards"])
def test_equal_rewards_want_easier_prompts_where_they_are_low_and_harder_ones_where_they_are_high(
    level: float, helps: str, hurts: str, known: str
) -> None:
    run = history(**EQUAL, reward__mean=flat(level), accuracy=flat(level))
    if known == "rewards":
        run = replace(run, curves={name: curve for name, curve in run.curves.items() if name != "accuracy"})
    assert helps in equal_cure(run)
    assert hurts not in equal_cure(run)
    if helps == "easier":
        assert "more samples per prompt" in equal_cure(run)


def test_equal_rewards_in_the_middle_want_neither() -> None:
    cure = equal_cure(history(**EQUAL, accuracy=flat(0.5)))
    assert "dynamic sampling" in cure
    assert "harder" not in cure
    assert "easier" not in cure
    # Of a reward of its own scale the place between its ends counts.
    scaled = history(**EQUAL, reward__min=flat(-4), reward__max=flat(4), reward__mean=flat(-3.5))
    scaled = replace(scaled, curves={name: curve for name, curve in scaled.curves.items() if name != "accuracy"})
    assert "easier" in equal_cure(scaled)


def test_a_greatest_reward_that_is_low_is_no_ceiling() -> None:
    low = {"reward__mean": flat(0.2), "reward__max": flat(0.2), "reward__min": flat(0.0)}
    run = history(**low, accuracy=flat(0.1))
    said = spoken(run, "watch")
    assert "easier prompts" in said["the same low reward for all"]
    assert not [words for words in said.values() if "harder prompts" in words]
    unknown = replace(run, curves={name: curve for name, curve in run.curves.items() if name != "accuracy"})
    assert "the same low reward for all" in spoken(unknown, "watch")
    assert "the same low reward for all" not in spoken(history(reward__mean=flat(0.99), accuracy=flat(0.99)), "watch")


# Clipping is advised where it is not on


def test_clipping_is_advised_only_where_the_norm_is_above_what_is_usual() -> None:
    spike = history(policy__grad_norm=lambda x: 50.0 if abs(x - 0.5) < 1e-9 else 0.5)
    clipped = spoken(replace(spike, clip_norm=1.0), "watch")["a spike of the gradient"]
    assert "was clipped to train.clip_norm = 1." in clipped
    assert "lower train.lr." in clipped
    loose = spoken(replace(spike, clip_norm=100.0), "watch")["a spike of the gradient"]
    assert "was clipped" not in loose
    assert "lower train.lr or train.clip_norm (100; the gradient norm is usually 0.499)" in loose
    grows = history(policy__grad_norm=lambda x: 0.5 * math.exp(6 * x))
    assert "clip" not in spoken(replace(grows, clip_norm=1.0), "bad")["exploding gradient"]
    assert "train.clip_norm (500" in spoken(replace(grows, clip_norm=500.0), "bad")["exploding gradient"]
    broken = history(policy__loss=lambda x: math.nan if x > 0.5 else 0.0)
    assert "clip" not in spoken(replace(broken, clip_norm=1.0), "bad")["a number that is none"]


def test_nothing_clipped_is_explained_by_one_update_only_where_there_is_one() -> None:
    assert "with one update per batch" in spoken(history(), "fine")["clipping"]
    several = history(policy__updates=flat(4), policy__kl_old=flat(1e-3))
    assert "one update" not in spoken(several, "fine")["clipping"]


# Whether a run is over


def test_a_finished_run_is_not_said_to_be_running(tmp_path: Path) -> None:
    cut = {**HEALTHY, "length/truncated": flat(0.2)}
    over = read_history(write_run(tmp_path / "over", cut, steps=40))
    assert verdict(over, diagnose(over))[1].startswith("Finished, with 1 thing to watch: cut-off samples.")
    stopped = read_history(write_run(tmp_path / "stopped", cut, steps=40, total=90))
    assert verdict(stopped, diagnose(stopped))[1].startswith("At step 40 of 90, with 1 thing to watch")
    log = EventLog(tmp_path / "over")  # it is taken up again
    log.note(RESUME, step=40)
    log.close()
    assert not read_history(tmp_path / "over").finished


def exact(curve: Curve) -> Curve:
    return Curve(curve.steps, tuple(float(round(value)) for value in curve.values))


def test_a_solved_task_may_lose_its_entropy() -> None:
    run = history(policy__entropy=lambda x: 0.8 * math.exp(-8 * x), accuracy=lambda x: min(0.99, 0.3 + 1.5 * x))
    assert "entropy" in spoken(run, "fine")


def test_one_spike_of_the_gradient_is_named_by_its_step() -> None:
    run = history(policy__grad_norm=lambda x: 50.0 if abs(x - 0.5) < 1e-9 else 0.5)
    assert "at step 60" in spoken(run, "watch")["a spike of the gradient"]


def test_a_run_of_examples_is_judged_by_its_losses() -> None:
    falls = history({"loss": lambda x: 2 * math.exp(-3 * x), "grad_norm": flat(1), "lr": flat(1e-3)})
    assert {found.rule for found in diagnose(falls)} >= {"learning", "gradient", "finite numbers"}
    severity, told = verdict(falls, diagnose(falls))
    assert severity == "fine"
    assert told.startswith("Healthy. Loss 1.")
    stays = history({"loss": flat(2)})
    assert "The loss does not fall" in spoken(stays, "watch")["nothing learned"]
    held = Curve((30, 60, 90, 120), (0.9, 0.5, 0.6, 0.7))
    over = replace(falls, curves={**falls.curves, "heldout/heldout_loss": held})
    assert "since step 60 (0.5 → 0.7)" in spoken(over, "watch")["overfitting"]


def test_a_run_that_has_hardly_begun_is_not_judged() -> None:
    assert verdict(History("empty", {}), []) == (
        "watch", "Too little was logged to judge this run. Nothing measured over 0 steps."
    )  # fmt: skip
    begun = history(steps=3)
    assert not spoken(begun, "bad")
    assert set(spoken(begun, "watch")) <= {"still warming up"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_bears_nonsense(rule: object) -> None:
    assert callable(rule)
    for value in (math.nan, math.inf, 0.0, -1.0):
        names = [*EVERYTHING, "loss", "grad_norm", "lr", "heldout/heldout_loss", "heldout/accuracy", "policy/updates"]
        for steps in (1, 2, 40):
            numbers = tuple(range(1, steps + 1))
            rule(History("odd", {name: Curve(numbers, (value,) * steps) for name in names}))
    rule(History("empty", {name: Curve((), ()) for name in EVERYTHING}))


# Held against the truth on held-out items


def against_truth(reward: list[float], truth: list[float]) -> History:
    steps = tuple(range(0, 10 * len(truth), 10))
    run = history()
    curves = {name: curve for name, curve in run.curves.items() if name != "accuracy"}
    held = {"reward": reward, "truth": truth, "truth_se": [0.02] * len(truth)}
    return replace(run, curves=curves | {f"heldout/{name}": Curve(steps, tuple(v)) for name, v in held.items()})


def test_over_optimisation_begins_at_the_best_truth() -> None:
    rises = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    found = {f.rule: f for f in diagnose(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]))}
    assert found["over-optimisation"].step == 30  # the first whose neighbours are at 0.6 as well
    assert "Since step 30 the truth falls (60 % → 50 % right)" in found["over-optimisation"].says
    assert verdict(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]), list(found.values()))[0] == "bad"


def test_a_fall_within_two_standard_errors_is_watched_and_one_within_one_is_none() -> None:
    rises = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    finding = next(
        f
        for f in diagnose(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.57, 0.57, 0.57]))
        if f.rule == "over-optimisation"
    )
    assert (finding.severity, finding.step) == ("watch", 30)
    assert "within two standard errors" in finding.says
    found = {f.rule for f in diagnose(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.59, 0.59, 0.59]))}
    assert "reward and truth agree" in found
    assert "over-optimisation" not in found


def test_a_truth_that_falls_with_the_reward_is_not_over_optimised() -> None:
    run = against_truth([0, 1, 2, 2, 1, 1, 0, 0], [0.2, 0.4, 0.6, 0.6, 0.5, 0.4, 0.3, 0.3])
    found = {finding.rule for finding in diagnose(run)}
    assert "over-optimisation" not in found


def test_a_reward_that_rises_alone_is_watched() -> None:
    found = {f.rule: f for f in diagnose(against_truth([0, 1, 2, 3, 4, 5], [0.3, 0.31, 0.3, 0.3, 0.32, 0.31]))}
    assert found["reward without truth"].severity == "watch"
