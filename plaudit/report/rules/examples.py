"""Diagnosis rules of runs that learn from examples."""

from __future__ import annotations

import math
from itertools import pairwise

from plaudit.report.finding import ENOUGH, Finding, number, percent
from plaudit.report.history import History

LITTLE = 0.02  # of the loss: less than any run that learns a format or a task
ITEMS = 100  # assumed where the number of held-out items was not logged
ORDERED = {
    "pair_accuracy": "new pairs of responses",
    "label_auc": "new pairs of a desirable and an undesirable response",
    "step_auc": "new pairs of a right and a wrong step",
}


def loss_falls(run: History) -> Finding | None:
    curve = None if run.reinforced else run.curve("loss")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    before, after = curve.early(), curve.late()
    moved = f"loss {number(before)} → {number(after)}"
    cure = f"{raise_lr(run)} Train longer, or check the data."
    if after >= before - curve.noise():
        says = f"The loss does not fall: {moved}; three standard errors are {number(curve.noise())}."
        return Finding("nothing learned", "watch", says, cure)
    if after > (1 - LITTLE) * before:
        says = f"The loss falls by less than {percent(LITTLE)}: {moved}."
        return Finding("hardly learned", "watch", says, cure)
    return Finding("learning", "fine", f"The loss falls: {number(before)} → {number(after)}.")


def at_chance(run: History) -> Finding | None:
    """A model that orders pairs or steps no better than chance, or hardly better than before it was trained."""
    if run.reinforced:
        return None
    figures = run.held_out()
    for name, counted in ORDERED.items():
        curve = figures.get(name)
        if curve is None or not curve.finite:
            continue
        several = len(curve.finite) >= ENOUGH  # evaluations, whose means say more than single ones
        before, after = (curve.early(), curve.late()) if several else (curve.finite[0], curve.finite[-1])
        items = run.evaluation.get("items", ITEMS)
        chance = 2 * math.sqrt(0.25 / max(1, items))  # two standard errors of a share of one half
        now = f"{percent(after)} of {counted}"
        cure = f"{raise_lr(run)} Train on more pairs, or check that the labels are right."
        if after <= 0.5 + chance:
            says = f"{now} are in the right order, and guessing gives 50 % ± {percent(chance)} with {items} of them."
            return Finding("no better than chance", "bad", says, cure)
        if len(curve.finite) > 1 and after < 0.9 and after - before <= chance / 2:
            says = f"{now} are in the right order, {percent(before)} were at first."
            return Finding("hardly learned", "watch", says, cure)
        return Finding("better than chance", "fine", f"{now} are in the right order.")
    return None


def raise_lr(run: History) -> str:
    """Advice on the learning rate, which names the one of the run."""
    rate = run.curve("lr", "policy/lr")
    used = "" if rate is None else f", which is {number(max(rate.finite))}"
    usual = "models below a billion parameters usually need 1e-5 to 5e-4, adapters 1e-4 to 1e-3"
    return f"Raise train.lr{used}: {usual}."


def overfitting(run: History) -> Finding | None:
    losses = run.held_out().get("heldout_loss")
    if run.reinforced or losses is None or len(losses.finite) < 3:
        return None
    least, last = min(losses.finite), losses.finite[-1]
    step = losses.steps[losses.values.index(least)]
    since = losses.finite[losses.finite.index(least) :]  # a single evaluation may be chance
    if last > least * 1.05 + 1e-6 and len(since) > 2 and all(a <= b for a, b in pairwise(since)):
        says = f"The held-out loss rises since step {step} ({number(least)} → {number(last)})."
        return Finding("overfitting", "watch", says, f"Stop near step {step}, use more data, or lower train.lr.")
    return Finding("held-out loss", "fine", f"The held-out loss is {number(last)}, at least {number(least)}.")
