"""Diagnosis rules of the rewards."""

from __future__ import annotations

from statistics import fmean

from plaudit.report.finding import ENOUGH, Finding, number, percent
from plaudit.report.history import History
from plaudit.report.rules.examples import raise_lr

FEW = 5  # evaluations of many items each that suffice to show a trend


def equal_groups(run: History) -> Finding | None:
    curve = run.curve("reward/zero_std_groups")
    if curve is None:
        return None
    share = curve.late()
    says = f"{percent(share)} of groups have equal rewards at the end"
    by_group = "value/mean" not in run.curves if run.grouped is None else run.grouped
    if not by_group:
        return Finding("groups", "fine", f"{says}; responses are not compared within groups, and all give a gradient.")
    if share < 0.5:
        return Finding("groups differ", "fine", f"{says}; the others give a gradient.")
    return Finding(
        "equal rewards within groups",
        "bad" if share >= 0.8 else "watch",
        f"{says}: no gradient from them.",
        _unequal(run),
    )


def _unequal(run: History) -> str:
    """How to make rewards of a group differ, depending on whether the samples are all good or all bad."""
    level = run.level
    if level is None:
        return "Raise the sampling temperature, take more samples per prompt, or set dynamic sampling."
    if level > 0.9:
        return "Most prompts are solved: give harder ones, or stop here."
    if level > 0.6:
        return "Many prompts are solved by every sample: give harder ones, or set dynamic sampling."
    if level < 0.4:
        return (
            "Most prompts are failed by every sample: give easier ones, take more samples per prompt, "
            "raise the sampling temperature, or fine-tune on examples first."
        )
    return (
        "Some prompts are solved by every sample and others by none: set dynamic sampling, "
        "or take more samples per prompt."
    )


def learning(run: History) -> Finding | None:
    curve = run.curve("reward/mean")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    before, after, noise = curve.early(), curve.late(), curve.noise()
    moved = f"reward {number(before)} → {number(after)}"
    if after < before - noise:
        return Finding(
            "the reward falls",
            "bad",
            f"The policy gets worse: {moved}.",
            "Lower train.lr; check the sign of the reward and of the advantages.",
        )
    if after <= before + noise and not run.saturated:
        says = f"No learning beyond chance: {moved}; three standard errors are {number(noise)}."
        return Finding(
            "nothing learned",
            "watch",
            says,
            f"{raise_lr(run)} Train longer; check whether groups differ in reward and whether samples are truncated.",
        )
    says = f"Reward {number(before)} → {number(after)}; three standard errors are {number(noise)}."
    return Finding("learning", "fine", says)


def early_dip(run: History) -> Finding | None:
    curve = run.curve("reward/mean")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    smooth = curve.smoothed()
    first, half = curve.finite[0], len(smooth) // 2
    low = min(smooth.values[:half])
    step = smooth.steps[smooth.values.index(low)]
    if first - low <= max(curve.noise(), 0.15 * (max(curve.finite) - min(curve.finite))) or curve.late() <= first:
        return Finding("start", "fine", f"The reward begins at {number(first)} and does not drop.")
    says = f"The reward fell at first, {number(first)} → {number(low)} near step {step}, before it rose."
    return Finding("a dip at the start", "watch", says, "The first updates are too large: warm up, or lower train.lr.")


def over_optimised(run: History) -> Finding | None:
    reward, truth = run.curve("reward/mean"), run.curve("accuracy", "heldout/accuracy")
    if reward is None or truth is None or len(truth.finite) < ENOUGH or len(reward.finite) < ENOUGH:
        return None
    smooth = truth.smoothed()
    peak = max(smooth.values)
    step = smooth.steps[smooth.values.index(peak)]
    after = smooth.values[-1]
    lost = peak - after
    gained = reward.late() - reward.smoothed().near(step)
    if lost > max(0.03, truth.noise()) and gained > -reward.noise() / 2:
        return _pleased(step, peak, after, gained)
    if reward.late() - reward.early() > reward.noise() and truth.late() - truth.early() <= truth.noise():
        return _without_truth(truth.early(), truth.late())
    return _agree(after)


def over_optimised_held_out(run: History) -> Finding | None:
    """Reward over-optimisation by the recipe's [truth] on held-out items. It began at the evaluation with the best
    truth, if from there to the end the truth falls by more than two standard errors while the reward on these items
    rises; with more than one standard error it may have. Each value is the mean of itself and its neighbours."""
    reward, truth, error = (run.curve(f"heldout/{name}") for name in ("reward", "truth", "truth_se"))
    if reward is None or truth is None or error is None or len(truth.finite) < FEW:
        return None
    proxy, smooth, chance = reward.smoothed(), truth.smoothed(), 2 * max(error.finite)
    peak, after = max(smooth.values), smooth.values[-1]
    step = smooth.steps[smooth.values.index(peak)]
    gained = proxy.values[-1] - proxy.near(step)
    if peak - after > chance / 2 and gained > 0:
        return _pleased(step, peak, after, gained, sure=peak - after > chance)
    if reward.finite[-1] > reward.finite[0] and truth.finite[-1] - truth.finite[0] <= chance:
        return _without_truth(truth.finite[0], truth.finite[-1])
    return _agree(after)


def _pleased(step: int, peak: float, after: float, gained: float, sure: bool = True) -> Finding:
    says = (
        f"Since step {step} the truth falls ({percent(peak)} → {percent(after)} right) while the reward is constant or "
        f"rises ({gained:+.3g}): the policy optimises the reward instead of being right."
    )
    if not sure:
        says += " The fall is within two standard errors: use more held-out items to be sure."
    cure = f"Use the checkpoint near step {step}; raise the KL coefficient, or fix the reward."
    return Finding("over-optimisation", "bad" if sure else "watch", says, cure, step)


def _without_truth(before: float, after: float) -> Finding:
    says = f"The reward rises but the truth does not ({percent(before)} → {percent(after)} right)."
    return Finding(
        "reward without truth", "watch", says, "Read samples with a high reward: it may reward the wrong thing."
    )


def _agree(after: float) -> Finding:
    return Finding(
        "reward and truth agree",
        "fine",
        f"The truth does not fall where the reward rises ({percent(after)} right at the end).",
    )


def saturated(run: History) -> Finding | None:
    if run.curve("reward/max") is None or run.curve("reward/mean") is None:
        return None
    if not run.saturated:
        return Finding("room to learn", "fine", "The reward is not at its maximum.")
    late = run.curves["reward/mean"].late()
    if (level := run.level) is not None and level < 0.5:
        says = f"Samples get the highest reward seen, {number(late)}: none shows how to get more."
        if right := run.right:
            says += f" {percent(right.late())} of them are right."
        cure = "Give easier prompts or more samples of each; check that a right answer gets more reward than others."
        return Finding("the same low reward for all", "watch", says, cure)
    says = f"The reward is at its maximum ({number(late)}): little is left to learn from these prompts."
    return Finding("saturated reward", "watch", says, "Stop here, or continue with harder prompts.")


def reward_errors(run: History) -> Finding | None:
    curve = run.curve("reward/errors")
    if curve is None:
        return None
    share = fmean(curve.finite)
    if share <= 0.01:
        return Finding("rewards arrive", "fine", f"{percent(share)} of samples could not be scored.")
    says = f"{percent(share)} of samples could not be scored (at worst {percent(max(curve.finite))} of a step)."
    return Finding(
        "reward errors",
        "bad" if share > 0.1 else "watch",
        says,
        "Read the errors in the samples below; a reward server's page lists its last ones.",
    )
