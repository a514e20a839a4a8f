"""Diagnosis rules of runs that learn from examples."""

from __future__ import annotations

from itertools import pairwise

from plaudit.report.finding import ENOUGH, Finding, number
from plaudit.report.history import History


def loss_falls(run: History) -> Finding | None:
    curve = None if run.reinforced else run.curve("loss")
    if curve is None or len(curve.finite) < ENOUGH:
        return None
    moved = f"loss {number(curve.early())} → {number(curve.late())}"
    if curve.late() < curve.early() - curve.noise():
        return Finding("learning", "fine", f"The loss falls: {number(curve.early())} → {number(curve.late())}.")
    return Finding(
        "nothing learned",
        "watch",
        f"The loss does not fall: {moved}; three standard errors are {number(curve.noise())}.",
        "Raise train.lr, train longer, or check the data.",
    )


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
