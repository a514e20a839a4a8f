"""Cost of a step in dollars, at each price level."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.term import Term
from plaudit.plan.shape.hardware import PRICES


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost per step, per million generated tokens and per run, by price level; a level without a public price is
    omitted."""

    step: dict[str, Term]
    million_tokens: dict[str, Term]
    run: dict[str, Term]
    tokens_per_device: float
    """Generated tokens per second and device."""


def cost(plan: Plan, seconds: float, generated_tokens: float, steps: int) -> Cost:
    pools = [plan.cluster] + ([] if plan.shared else [plan.generation_cluster])
    step, million, run = {}, {}, {}
    for level in PRICES:
        prices = [pool.accelerator.price.at(level) for pool in pools]
        known = [price * pool.devices for price, pool in zip(prices, pools, strict=True) if price is not None]
        if len(known) < len(pools):
            continue
        hourly = sum(known)
        dollars = hourly * seconds / 3600
        inputs = (("$ per hour", hourly), ("seconds", seconds))
        step[level] = Term(f"step at {level} price", dollars, "$", "sum of devices · price · seconds / 3600", inputs)
        million[level] = Term(
            f"million tokens at {level} price", dollars / generated_tokens * 1e6, "$",
            "$ of a step / generated tokens · 10⁶",
            (("$", dollars), ("tokens", generated_tokens)),
        )  # fmt: skip
        run[level] = Term(f"run at {level} price", dollars * steps, "$", "$ of a step · steps", (("steps", steps),))
    return Cost(step, million, run, generated_tokens / seconds / plan.devices)
