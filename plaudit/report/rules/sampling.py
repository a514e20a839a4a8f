"""Diagnosis rules of the samples and the engine: lengths, mismatch, staleness, time."""

from __future__ import annotations

from plaudit.report.finding import ENOUGH, Finding, number, percent
from plaudit.report.history import History


def truncation(run: History) -> Finding | None:
    curve = run.curve("length/truncated")
    if curve is None:
        return None
    share = curve.late()
    says = f"{percent(share)} of samples are truncated at the token limit"
    if share <= 0.1:
        return Finding("samples end", "fine", f"{says}.")
    cure = "Raise the token limit of samples, or penalise length; exclude truncated samples from the loss."
    return Finding(
        "cut-off samples",
        "bad" if share > 0.3 else "watch",
        f"{says}: their reward says little about their answer.",
        cure,
    )


def out_of_turns(run: History) -> Finding | None:
    curve = run.curve("turns/out_of_turns")
    if curve is None:
        return None
    share = curve.late()
    says = f"{percent(share)} of episodes end because they have environment.max_turns"
    if share <= 0.1:
        return Finding("episodes end", "fine", f"{says}.")
    cure = "Raise environment.max_turns, or let the environment end an episode that gets nowhere."
    return Finding(
        "too few turns", "bad" if share > 0.3 else "watch", f"{says}, before their environment ends them.", cure
    )


def length_growth(run: History) -> Finding | None:
    length, reward = run.curve("length/mean"), run.curve("reward/mean")
    if length is None or reward is None or len(length.finite) < ENOUGH or len(reward.finite) < ENOUGH:
        return None
    before, after = length.early(), length.late()
    moved = f"{before:.0f} → {after:.0f} tokens"
    if after > 1.5 * before and reward.late() - reward.early() <= reward.noise():
        return Finding(
            "length without reward",
            "watch",
            f"Samples grow ({moved}) but the reward does not.",
            "Divide the loss by a constant instead of each sample's length, or penalise length.",
        )
    if after < 0.4 * before:
        return Finding(
            "samples shrink",
            "watch",
            f"Samples shrink: {moved}.",
            "Read some below: a policy that gives up early is short.",
        )
    return Finding("length", "fine", f"Samples go from {moved}.")


def mismatch(run: History) -> Finding | None:
    curve = run.curve("mismatch/abs_mean")
    if curve is None:
        return None
    late = curve.late()
    says = f"Trainer and engine differ by {number(late)} per token in log-probability"
    if late <= 1e-3:
        return Finding("trainer and engine agree", "fine", f"{says}.")
    if (stale := run.curve("staleness/mean")) and stale.late() > 0:
        says += f", with samples {number(stale.late())} versions old"
        return Finding(
            "mismatch",
            "watch" if late < 0.2 else "bad",
            f"{says}.",
            "Bound the staleness more tightly, or correct with importance weights.",
        )
    if late <= 0.02:
        return Finding(
            "mismatch",
            "watch",
            f"{says}: usual in bfloat16, too much in float32.",
            "In float32 check whether temperature, template or kernels differ between the two.",
        )
    return Finding(
        "mismatch too large",
        "bad",
        f"{says}: more than rounding.",
        "Likely stale weights in the engine: check that every update is published and both use one temperature.",
    )


def effective_samples(run: History) -> Finding | None:
    curve = run.curve("mismatch/ess")
    if curve is None:
        return None
    share = curve.late()
    says = f"The importance weights leave {percent(share)} of the samples effective"
    if share >= 0.7:
        return Finding("effective samples", "fine", f"{says}.")
    return Finding(
        "few effective samples",
        "bad" if share < 0.3 else "watch",
        f"{says}: a few samples dominate the update.",
        "Truncate the weights lower, keep samples fresher, or find the cause of the mismatch.",
    )


def staleness(run: History) -> Finding | None:
    most, dropped = run.curve("staleness/max"), run.curve("rollout/dropped")
    bound = run.curve("rollout/staleness_bound")
    if most is None:
        return None
    late = most.late()
    says = f"Samples are at most {number(late)} versions old at the end"
    lost = max(dropped.finite) / len(dropped.finite) if dropped else 0.0  # counts from the first step on
    if lost > 0:
        return Finding(
            "samples too old",
            "watch",
            f"{says}; {number(lost)} per step are dropped as too old.",
            "Generate less ahead, or give the trainer more of the hardware.",
        )
    if bound and late >= 0.9 * bound.late() > 0:
        says += f", the bound is {number(bound.late())}: generation is as far ahead as allowed"
        return Finding("staleness at its bound", "fine", f"{says}, and the trainer does not wait for it.")
    return Finding("fresh samples", "fine", f"{says}.")


_FASTER = {
    "generate": "Larger batches, shorter samples, more engines; or generate ahead of the trainer.",
    "tools": "Raise environment.threads, make the environment faster, or generate meanwhile (placement async).",
    "reward": "More workers for the reward, larger batches to it, or score while generating.",
    "update": "Larger micro-batches, fewer updates per batch.",
    "publish": "Publish less often, or share memory between trainer and engine.",
    "checkpoint": "Write checkpoints less often.",
    "evaluate": "Evaluate less often or on fewer items.",
}


def slowest_phase(run: History) -> Finding | None:
    split = run.time_split() if run.phases() else {}
    total = sum(split.values())
    if not total:
        return None
    name, seconds = next(iter(split.items()))
    share = seconds / total
    says = f"{percent(share)} of the time goes to {name} ({seconds:.0f} of {total:.0f} s)"
    if share <= 0.6:
        return Finding("time", "fine", f"{says}, more than to any other phase.")
    return Finding(
        f"{name} takes most of the time",
        "watch",
        f"{says}.",
        _FASTER.get(name, "Optimise this phase first if the run is too slow."),
    )
