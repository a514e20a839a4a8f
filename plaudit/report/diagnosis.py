"""Diagnoses problems of a run: what is wrong, with numbers and a fix.

Each rule is a function of a run's history. It returns a finding, also if everything is fine, or None if the run has not
logged what it needs. "At the end" is the mean of the last quarter of the run, "at first" that of its first
fifth; a change of less than three standard errors is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plaudit.report.finding import WORST_FIRST, Finding, Severity, count, number, percent
from plaudit.report.history import History
from plaudit.report.rules import examples, integrity, memory, policy, reward, sampling

Rule = Callable[[History], Finding | None]

# The order of findings of the same severity.
RULES: tuple[Rule, ...] = (
    policy.not_finite, policy.other_settings, reward.over_optimised, reward.over_optimised_held_out,
    *integrity.GAMED,
    reward.equal_groups, reward.learning, reward.early_dip,
    examples.loss_falls, examples.at_chance, examples.overfitting, policy.entropy, policy.kl_without_reward,
    policy.gradient, reward.reward_errors, sampling.truncation, sampling.out_of_turns, sampling.length_growth,
    reward.saturated, policy.first_ratio,
    sampling.mismatch, sampling.effective_samples, sampling.staleness, policy.clipping,
    policy.values_beyond_rewards, policy.critic, policy.zero_loss, policy.warm_up, sampling.slowest_phase,
    memory.fullest_phase,
)  # fmt: skip


def diagnose(run: History) -> list[Finding]:
    """All findings, worst first."""
    findings = [finding for rule in RULES if (finding := rule(run))]
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity))


def verdict(run: History, findings: Sequence[Finding], held_out: bool = True) -> tuple[Severity, str]:
    """A summary in one line: the worst finding, and what was learned; `held_out`: with held-out figures."""
    progress = _progress(run, held_out)
    bad = [finding for finding in findings if finding.severity == "bad"]
    watch = [finding for finding in findings if finding.severity == "watch"]
    if bad:
        more = f", and {count(len(bad) - 1, 'more problem')}" if len(bad) > 1 else ""
        return "bad", f"Not well: {bad[0].rule}{more}. {progress}"
    if watch:
        things = f"{count(len(watch), 'thing')} to watch: {watch[0].rule}"
        if run.finished:
            things = f"Finished, with {things}"
        elif run.planned_steps:
            # The log does not show whether the process is still running, only the step it has reached.
            things = f"At step {run.steps} of {run.planned_steps}, with {things}"
        return "watch", f"{things}. {progress}"
    if not findings:
        return "watch", f"Too little was logged to judge this run. {progress}"
    return "fine", f"Healthy. {progress}"


def _progress(run: History, held_out: bool) -> str:
    parts = []
    if run.reinforced:
        if score := run.curve("reward/mean"):
            parts.append(f"reward {number(score.early())} → {number(score.late())}")
        accuracy = run.held_out().get("accuracy")
        if accuracy and len(accuracy.finite) > 1:
            if held_out:
                parts.append(f"held-out answers right {percent(accuracy.finite[0])} → {percent(accuracy.finite[-1])}")
        elif truth := run.truth:
            parts.append(f"answers right {percent(truth.early())} → {percent(truth.late())}")
    elif loss := run.curve("loss"):
        parts.append(f"loss {number(loss.early())} → {number(loss.late())}")
    line = ", ".join(parts) or "nothing measured"
    return f"{line[0].upper()}{line[1:]} over {count(run.steps, 'step')}."
