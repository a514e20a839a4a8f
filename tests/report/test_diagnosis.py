"""Each rule on synthetic runs: it reports a problem with its numbers if there is one, and nothing otherwise."""

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


def reported(run: History, severity: str) -> dict[str, str]:
    return {finding.rule: f"{finding.says} {finding.cure}" for finding in diagnose(run) if finding.severity == severity}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shapes", [HEALTHY, EVERYTHING], ids=["grpo", "ppo"])
def test_a_healthy_run_has_a_healthy_verdict(shapes: dict[str, Shape], seed: int) -> None:
    run = history(shapes, seed=seed)
    findings = diagnose(run)
    assert {finding.severity for finding in findings} == {"fine"}
    assert len(findings) >= 18
    severity, sentence = verdict(run, findings)
    assert severity == "fine"
    assert sentence.startswith("Healthy. Reward 0.3")
    assert sentence.endswith("over 120 steps.")


@pytest.mark.parametrize(
    ("severity", "rule", "message", "changed"),
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
def test_a_rule_reports_its_problem_with_the_numbers(
    severity: str, rule: str, message: str, changed: dict[str, Shape]
) -> None:
    run = history(**changed)
    # Bounds and update counts are settings, so they get no noise.
    run = replace(run, curves={name: exact(curve) if "bound" in name or "updates" in name else curve
                               for name, curve in run.curves.items()})  # fmt: skip
    findings = reported(run, severity)
    assert rule in findings, [(finding.severity, finding.rule) for finding in diagnose(run)]
    assert message in findings[rule]
    if severity != "fine":
        assert rule not in reported(history(EVERYTHING), severity)
        assert verdict(run, diagnose(run))[0] in ("bad", severity)


# Equal rewards within groups: the suggested fix depends on how good the samples are


def test_equal_rewards_within_groups_matter_only_for_group_baselines() -> None:
    """PPO's critic and REINFORCE's returns give a gradient independently of the other samples in a group."""
    equal = history(HEALTHY, reward__zero_std_groups=flat(0.9))
    rule = "equal rewards within groups"
    assert rule in reported(equal, "bad")
    assert rule in reported(replace(equal, grouped=True), "bad")
    assert rule not in reported(replace(equal, grouped=False), "bad")
    assert rule not in reported(history({**HEALTHY, **CRITIC}, reward__zero_std_groups=flat(0.9)), "bad")


EQUAL = {"reward__zero_std_groups": flat(0.9)}


def equal_cure(run: History) -> str:
    return next(finding.cure for finding in diagnose(run) if finding.rule == "equal rewards within groups")


@pytest.mark.parametrize(
    ("level", "helps", "hurts"),
    [(0.05, "easier", "harder"), (0.2, "easier", "harder"), (0.75, "harder", "easier"), (0.97, "harder", "easier")],
)
@pytest.mark.parametrize("known", ["answers", "rewards"])
def test_equal_low_rewards_suggest_easier_and_equal_high_rewards_harder_prompts(
    level: float, helps: str, hurts: str, known: str
) -> None:
    run = history(**EQUAL, reward__mean=flat(level), accuracy=flat(level))
    if known == "rewards":
        run = replace(run, curves={name: curve for name, curve in run.curves.items() if name != "accuracy"})
    assert helps in equal_cure(run)
    assert hurts not in equal_cure(run)
    if helps == "easier":
        assert "more samples per prompt" in equal_cure(run)


def test_equal_medium_rewards_suggest_dynamic_sampling() -> None:
    cure = equal_cure(history(**EQUAL, accuracy=flat(0.5)))
    assert "dynamic sampling" in cure
    assert "harder" not in cure
    assert "easier" not in cure
    # With another reward scale, the position between minimum and maximum counts.
    scaled = history(**EQUAL, reward__min=flat(-4), reward__max=flat(4), reward__mean=flat(-3.5))
    scaled = replace(scaled, curves={name: curve for name, curve in scaled.curves.items() if name != "accuracy"})
    assert "easier" in equal_cure(scaled)


def test_a_low_maximum_reward_is_not_reported_as_saturated() -> None:
    low = {"reward__mean": flat(0.2), "reward__max": flat(0.2), "reward__min": flat(0.0)}
    run = history(**low, accuracy=flat(0.1))
    findings = reported(run, "watch")
    assert "easier prompts" in findings["the same low reward for all"]
    assert not [words for words in findings.values() if "harder prompts" in words]
    unknown = replace(run, curves={name: curve for name, curve in run.curves.items() if name != "accuracy"})
    assert "the same low reward for all" in reported(unknown, "watch")
    assert "the same low reward for all" not in reported(history(reward__mean=flat(0.99), accuracy=flat(0.99)), "watch")


# Gradient clipping is suggested where it has no effect yet


def test_a_lower_clip_norm_is_suggested_only_above_the_usual_gradient_norm() -> None:
    spike = history(policy__grad_norm=lambda x: 50.0 if abs(x - 0.5) < 1e-9 else 0.5)
    clipped = reported(replace(spike, clip_norm=1.0), "watch")["a spike of the gradient"]
    assert "was clipped to train.clip_norm = 1." in clipped
    assert "lower train.lr." in clipped
    loose = reported(replace(spike, clip_norm=100.0), "watch")["a spike of the gradient"]
    assert "was clipped" not in loose
    assert "lower train.lr or train.clip_norm (100; the gradient norm is usually 0.499)" in loose
    grows = history(policy__grad_norm=lambda x: 0.5 * math.exp(6 * x))
    assert "clip" not in reported(replace(grows, clip_norm=1.0), "bad")["exploding gradient"]
    assert "train.clip_norm (500" in reported(replace(grows, clip_norm=500.0), "bad")["exploding gradient"]
    broken = history(policy__loss=lambda x: math.nan if x > 0.5 else 0.0)
    assert "clip" not in reported(replace(broken, clip_norm=1.0), "bad")["a number that is none"]


def test_one_update_per_batch_explains_zero_clipping_only_if_there_is_one() -> None:
    assert "with one update per batch" in reported(history(), "fine")["clipping"]
    several = history(policy__updates=flat(4), policy__kl_old=flat(1e-3))
    assert "one update" not in reported(several, "fine")["clipping"]


# Finished and unfinished runs


def test_the_verdict_distinguishes_finished_and_unfinished_runs(tmp_path: Path) -> None:
    cut = {**HEALTHY, "length/truncated": flat(0.2)}
    over = read_history(write_run(tmp_path / "over", cut, steps=40))
    assert verdict(over, diagnose(over))[1].startswith("Finished, with 1 thing to watch: cut-off samples.")
    stopped = read_history(write_run(tmp_path / "stopped", cut, steps=40, total=90))
    assert verdict(stopped, diagnose(stopped))[1].startswith("At step 40 of 90, with 1 thing to watch")
    log = EventLog(tmp_path / "over")  # the run is resumed
    log.note(RESUME, step=40)
    log.close()
    assert not read_history(tmp_path / "over").finished


def exact(curve: Curve) -> Curve:
    return Curve(curve.steps, tuple(float(round(value)) for value in curve.values))


def test_entropy_loss_is_fine_on_a_solved_task() -> None:
    run = history(policy__entropy=lambda x: 0.8 * math.exp(-8 * x), accuracy=lambda x: min(0.99, 0.3 + 1.5 * x))
    assert "entropy" in reported(run, "fine")


def test_a_gradient_spike_is_reported_with_its_step() -> None:
    run = history(policy__grad_norm=lambda x: 50.0 if abs(x - 0.5) < 1e-9 else 0.5)
    assert "at step 60" in reported(run, "watch")["a spike of the gradient"]


def test_a_supervised_run_is_judged_by_its_losses() -> None:
    falls = history({"loss": lambda x: 2 * math.exp(-3 * x), "grad_norm": flat(1), "lr": flat(1e-3)})
    assert {finding.rule for finding in diagnose(falls)} >= {"learning", "gradient", "finite numbers"}
    severity, sentence = verdict(falls, diagnose(falls))
    assert severity == "fine"
    assert sentence.startswith("Healthy. Loss 1.")
    stays = history({"loss": flat(2)})
    assert "The loss does not fall" in reported(stays, "watch")["nothing learned"]
    heldout = Curve((30, 60, 90, 120), (0.9, 0.5, 0.6, 0.7))
    over = replace(falls, curves={**falls.curves, "heldout/heldout_loss": heldout})
    assert "since step 60 (0.5 → 0.7)" in reported(over, "watch")["overfitting"]


def test_a_run_with_too_few_steps_is_not_judged() -> None:
    assert verdict(History("empty", {}), []) == (
        "watch", "Too little was logged to judge this run. Nothing measured over 0 steps."
    )  # fmt: skip
    begun = history(steps=3)
    assert not reported(begun, "bad")
    assert set(reported(begun, "watch")) <= {"still warming up"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_accept_non_finite_and_empty_curves(rule: object) -> None:
    assert callable(rule)
    for value in (math.nan, math.inf, 0.0, -1.0):
        names = [*EVERYTHING, "loss", "grad_norm", "lr", "heldout/heldout_loss", "heldout/accuracy", "policy/updates"]
        for steps in (1, 2, 40):
            numbers = tuple(range(1, steps + 1))
            rule(History("odd", {name: Curve(numbers, (value,) * steps) for name in names}))
    rule(History("empty", {name: Curve((), ()) for name in EVERYTHING}))


# Reward against truth on held-out items


def against_truth(reward: list[float], truth: list[float]) -> History:
    steps = tuple(range(0, 10 * len(truth), 10))
    run = history()
    curves = {name: curve for name, curve in run.curves.items() if name != "accuracy"}
    heldout = {"reward": reward, "truth": truth, "truth_se": [0.02] * len(truth)}
    return replace(run, curves=curves | {f"heldout/{name}": Curve(steps, tuple(v)) for name, v in heldout.items()})


def test_over_optimisation_starts_at_the_best_truth() -> None:
    rises = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    findings = {f.rule: f for f in diagnose(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]))}
    assert findings["over-optimisation"].step == 30  # the first step whose adjacent values are 0.6 too
    assert "Since step 30 the truth falls (60 % → 50 % right)" in findings["over-optimisation"].says
    assert verdict(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]), list(findings.values()))[0] == "bad"


def test_severity_of_a_drop_in_truth_depends_on_its_standard_errors() -> None:
    rises = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    finding = next(
        f
        for f in diagnose(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.57, 0.57, 0.57]))
        if f.rule == "over-optimisation"
    )
    assert (finding.severity, finding.step) == ("watch", 30)
    assert "within two standard errors" in finding.says
    rules = {f.rule for f in diagnose(against_truth(rises, [0.2, 0.4, 0.6, 0.6, 0.6, 0.59, 0.59, 0.59]))}
    assert "reward and truth agree" in rules
    assert "over-optimisation" not in rules


def test_a_truth_that_falls_with_the_reward_is_not_over_optimised() -> None:
    run = against_truth([0, 1, 2, 2, 1, 1, 0, 0], [0.2, 0.4, 0.6, 0.6, 0.5, 0.4, 0.3, 0.3])
    rules = {finding.rule for finding in diagnose(run)}
    assert "over-optimisation" not in rules


def test_a_reward_that_rises_without_truth_has_severity_watch() -> None:
    findings = {f.rule: f for f in diagnose(against_truth([0, 1, 2, 3, 4, 5], [0.3, 0.31, 0.3, 0.3, 0.32, 0.31]))}
    assert findings["reward without truth"].severity == "watch"
