"""Diagnosis rules of the policy's metrics: gradient, entropy, KL, clipping, critic."""

from __future__ import annotations

from statistics import median

from plaudit.report.finding import ENOUGH, Finding, number, percent
from plaudit.report.history import History

_NEAR = 4  # times the usual gradient norm: a clip_norm within this factor limits spikes


def other_settings(run: History) -> Finding | None:
    if not run.changes:
        return None
    changes = [f"{e['key']} = {e['new']} instead of {e['old']} from step {e['step']} on" for e in run.changes]
    cure = "The figures before and after are not comparable."
    if all(event["key"].startswith("sampling.eval") for event in run.changes):
        cure = "Held-out figures before and after were sampled differently: do not compare them. Training is the same."
    return Finding("settings changed on resumption", "watch", f"The run was resumed with {'; '.join(changes)}.", cure)


def not_finite(run: History) -> Finding | None:
    watched = ("policy/loss", "policy/grad_norm", "reward/mean", "kl/reference", "value/loss", "loss", "grad_norm")
    curves = [(name, curve) for name in watched if (curve := run.curves.get(name))]
    if not curves:
        return None
    broken = [(step, name) for name, curve in curves if (step := curve.first_not_finite) is not None]
    if not broken:
        return Finding("finite numbers", "fine", "Losses, gradients and rewards are finite at every step.")
    step, name = min(broken)
    says = f"{name} is not finite, first at step {step}."
    return Finding(
        "a number that is none",
        "bad",
        says,
        f"Go back to a checkpoint before it, and lower train.lr{_or_clip(run)}.",
    )


def gradient(run: History) -> Finding | None:
    curve = run.curve("policy/grad_norm", "grad_norm")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    usual, late = median(curve.finite), curve.late()
    peak = max(curve.finite)
    step = curve.steps[curve.values.index(peak)]
    if usual > 0 and late > 10 * max(curve.early(), usual / 10):
        says = f"The gradient norm grew from {number(curve.early())} to {number(late)}."
        return Finding("exploding gradient", "bad", says, f"Lower train.lr{_or_clip(run)}, or use a longer warm-up.")
    if usual > 0 and peak > 20 * usual:
        says = f"The gradient norm jumped to {number(peak)} at step {step}; it is usually {number(usual)}."
        if run.clip_norm is not None and peak > run.clip_norm:
            says += f" The update was clipped to train.clip_norm = {number(run.clip_norm)}."
        cure = f"Check the samples of that step; if it happens again, lower train.lr{_or_clip(run)}."
        return Finding("a spike of the gradient", "watch", says, cure)
    return Finding("gradient", "fine", f"The gradient norm stays near {number(usual)}, at most {number(peak)}.")


def _or_clip(run: History) -> str:
    """Advice to clip, if clipping does not yet limit the gradient to its usual value."""
    curve = run.curve("policy/grad_norm", "grad_norm")
    usual = median(curve.finite) if curve else 0.0
    if run.clip_norm is None or usual <= 0 or run.clip_norm <= _NEAR * usual:
        return ""
    return f" or train.clip_norm ({number(run.clip_norm)}; the gradient norm is usually {number(usual)})"


def entropy(run: History) -> Finding | None:
    curve = run.curve("policy/entropy")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    before, after = curve.early(), curve.late()
    moved = f"entropy {number(before)} → {number(after)}"
    solved = (truth := run.truth) is not None and truth.late() > 0.9
    if after < 0.1 * before and not solved:
        return Finding(
            "entropy collapse",
            "bad",
            f"The policy has stopped exploring: {moved}.",
            "Raise the temperature, the upper clip bound or the entropy bonus; lower train.lr.",
        )
    if after < 0.3 * before and not solved:
        return Finding(
            "entropy falls",
            "watch",
            f"The policy explores less and less: {moved}.",
            "If the reward stops rising, raise the upper clip bound or the temperature.",
        )
    if after > 2 * before + 0.05:
        return Finding(
            "entropy grows",
            "watch",
            f"The policy becomes more random: {moved}.",
            "Lower train.lr or the entropy bonus; check the samples for noise.",
        )
    return Finding(
        "entropy", "fine", f"Entropy {number(before)} → {number(after)}{': the prompts are solved' if solved else ''}."
    )


def kl_without_reward(run: History) -> Finding | None:
    kl, reward = run.curve("kl/reference"), run.curve("reward/mean")
    if kl is None or reward is None or len(kl.finite) < ENOUGH or len(reward.finite) < ENOUGH:
        return None
    before, after = kl.middle(), kl.late()
    gain = reward.late() - reward.middle()
    moved = f"KL to the reference {number(before)} → {number(after)} over the second half"
    if after > 1.5 * before and after > 0.01 and gain <= reward.noise() and not run.saturated:
        says = f"The policy moves away without getting better: {moved}, reward {gain:+.3g}."
        return Finding(
            "KL grows without reward",
            "watch",
            says,
            "Raise the KL coefficient or lower train.lr; an earlier checkpoint is likely as good.",
        )
    return Finding("KL to the reference", "fine", f"{moved}, reward {gain:+.3g}.")


def clipping(run: History) -> Finding | None:
    curves = [curve for name in ("policy/clip_low", "policy/clip_high") if (curve := run.curve(name))]
    if not curves:
        return None
    share = sum(curve.late() for curve in curves)
    if share > 0.2:
        says = f"{percent(share)} of tokens are clipped: most of the update is discarded."
        return Finding(
            "too much clipping",
            "bad" if share > 0.35 else "watch",
            says,
            "Lower train.lr, make fewer updates per batch, or widen the clip range.",
        )
    if share == 0:
        updates = run.curve("policy/updates")
        kl = run.curve("policy/kl_old")
        if updates and updates.late() > 1 and kl and abs(kl.late()) < 1e-6:
            says = f"Nothing is ever clipped and the policy hardly changes within a batch (KL {number(kl.late())})."
            return Finding("tiny updates", "watch", says, "Raise train.lr.")
        says = "Nothing is clipped"
        if updates is None or updates.late() <= 1:
            says += ": with one update per batch the ratio is always 1"
        return Finding("clipping", "fine", f"{says}.")
    return Finding("clipping", "fine", f"{percent(share)} of tokens are clipped.")


def first_ratio(run: History) -> Finding | None:
    ratio, kl, updates = run.curve("policy/ratio_mean"), run.curve("policy/kl_old"), run.curve("policy/updates")
    if ratio is None and kl is None:
        return None
    single = updates is not None and max(updates.finite) <= 1
    # With one update per batch both log-probs are computed with the same weights: they differ only by rounding.
    most, most_kl = (0.01, 1e-3) if single else (0.1, 0.1)
    off = max(abs(value - 1) for value in (ratio.finite if single else ratio.finite[:1])) if ratio else 0.0
    far = max(abs(value) for value in (kl.finite if single else kl.finite[:1])) if kl else 0.0
    where = "with one update per batch" if single else "at the first step"
    says = f"The ratio of new to old probabilities differs from 1 by {number(off)}, their KL is {number(far)}, {where}."
    if off <= most and far <= most_kl:
        return Finding("ratio at 1", "fine", says)
    return Finding(
        "ratio far from 1",
        "bad",
        says,
        "The old log-probs were not computed with these weights: check dropout, temperature, dtype and the order of "
        "tokens.",
    )


def zero_loss(run: History) -> Finding | None:
    loss, norm = run.curve("policy/loss"), run.curve("policy/grad_norm")
    if loss is None or max(abs(value) for value in loss.finite) > 1e-6:
        return None
    if norm and max(norm.finite) == 0:
        return Finding(
            "no gradient",
            "bad",
            "The loss and its gradient are 0 at every step: nothing is trained.",
            "Check whether all rewards of a group are equal, and whether the mask removes all tokens.",
        )
    says = (
        "The loss is 0: normal with one update per batch, where the ratio is 1 and the advantages sum to 0. "
        "Its gradient is not 0."
    )
    return Finding("loss of 0", "fine", says)


def warm_up(run: History) -> Finding | None:
    curve = run.curve("policy/lr", "lr")
    if curve is None or len(curve.finite) < 3:
        return None
    peak = max(curve.values)
    step = curve.steps[curve.values.index(peak)]
    if step == curve.steps[-1] and curve.values[0] < peak * 0.9:
        return Finding(
            "still warming up",
            "watch",
            f"The learning rate was still rising at step {step} ({number(peak)}).",
            "Judge the run later, or shorten the warm-up.",
        )
    return Finding("warm-up", "fine", f"The learning rate reached its maximum, {number(peak)}, at step {step}.")


def values_beyond_rewards(run: History) -> Finding | None:
    """A critic should estimate the rewards still to come: at most the maximum reward seen, and at least the
    minimum, less the KL penalty."""
    value, greatest, least = run.curve("value/mean"), run.curve("reward/max"), run.curve("reward/min")
    if value is None or greatest is None or least is None:
        return None
    others = [curve for name in ("shaped_reward/mean", "turns/reward") if (curve := run.curve(name))]
    kl, coef = run.curve("kl/reference_per_response"), run.curve("kl/coef")
    off = max(0.0, max(kl.finite) * max(coef.finite)) if kl and coef else 0.0
    top = max([*greatest.finite, *(x for curve in others for x in curve.finite)])
    bottom = min([*least.finite, *(x for curve in others for x in curve.finite)]) - off
    span = max(top - bottom, abs(top), abs(bottom))
    late = value.late()
    if bottom - span <= late <= top + span:
        return Finding("values", "fine", f"Values ({number(late)}) are within the range of rewards.")
    says = f"The critic's mean value is {number(late)}, but rewards were {number(bottom)} to {number(top)}"
    cut = run.curve("length/truncated")
    if cut and cut.late() > 0.01:
        says += f"; {percent(cut.late())} of responses are truncated"
        cure = "Set algorithm.bootstrap = false, or lower algorithm.gamma: bootstrapped values amplify themselves."
    else:
        cure = "Lower critic.lr, or train the critic first for some steps (critic.warmup)."
    return Finding("values beyond rewards", "bad", f"{says}.", cure)


def critic(run: History) -> Finding | None:
    curve = run.curve("value/explained_variance")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    late = curve.late()
    if late > 0.05:
        return Finding("critic", "fine", f"The critic explains {percent(late)} of the variance of returns.")
    says = f"The critic explains nothing of the returns (explained variance {number(late)} at the end)."
    return Finding(
        "useless critic",
        "bad" if late < -0.5 else "watch",
        says,
        "Train the critic first for some steps, raise its learning rate, or use a group baseline instead.",
    )
