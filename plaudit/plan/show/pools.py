"""Separate pools for prefill, decode and training, in the terminal and as data."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.plan.pools import Arrangement, PoolPlan
from plaudit.plan.show.listing import new_console, seconds

UNMEASURED = (
    "pools work at the same time, each on another batch; whole nodes above one; validated by no run in which prefill "
    "and decode were apart"
)


def print_pools(plan: PoolPlan, console: Console | None = None) -> None:
    console = console or new_console()
    console.print(f"[bold]{escape(plan.headline)}[/bold]", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "pool", "hardware", "cut"):
        table.add_column(heading)
    for heading in ("busy s", "step s", "$/h", "$/M tokens"):
        table.add_column(heading, justify="right")
    for name, arrangement in _arrangements(plan):
        for pool in arrangement.pools:
            table.add_row(
                name, pool.work, pool.place.name, pool.cut, seconds(pool.seconds), "", f"{pool.hourly:,.2f}", ""
            )
            name = ""
        table.add_row("", "all", f"{arrangement.devices} devices", "", "", seconds(arrangement.step),
                      f"{arrangement.hourly:,.2f}", f"{arrangement.per_million:.2f}")  # fmt: skip
    for offer in plan.together.any_software[:1] if plan.together else ():
        prediction = offer.prediction
        million = prediction.cost.million_tokens[plan.market.level].value
        table.add_row("one kind", prediction.plan.placement, offer.place.name, str(prediction.plan.training), "",
                      seconds(prediction.step.value), f"{offer.hourly:,.2f}", f"{million:.2f}")  # fmt: skip
    console.print(table)
    rate = plan.apart.kv_rate / 1e9
    lines = [f"prefill to decode: {rate:.3g} GB/s of keys and values to each decoding device", UNMEASURED]
    for line in (*lines, plan.market.question.price_basis):
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)


def pools_data(plan: PoolPlan) -> dict[str, Any]:
    best = plan.together.any_software[0] if plan.together else None
    return {
        "headline": plan.headline, "limit_seconds": plan.limit, "price": plan.market.level,
        "price_basis": plan.market.question.price_basis,
        "arrangements": [
            {"name": name, "step_seconds": each.step, "sync_seconds": each.sync, "dollars_per_hour": each.hourly,
             "dollars_per_million_tokens": each.per_million, "kv_bytes_per_second_and_device": each.kv_rate,
             "pools": [{"work": pool.work, "hardware": pool.place.name, "devices": pool.place.devices, "cut": pool.cut,
                        "busy_seconds": pool.seconds, "dollars_per_hour": pool.hourly} for pool in each.pools]}
            for name, each in _arrangements(plan)
        ],
        "one_kind": best and {
            "hardware": best.place.name, "placement": best.prediction.plan.placement,
            "step_seconds": best.prediction.step.value, "dollars_per_hour": best.hourly,
            "dollars_per_million_tokens": best.prediction.cost.million_tokens[plan.market.level].value,
        },
    }  # fmt: skip


def _arrangements(plan: PoolPlan) -> list[tuple[str, Arrangement]]:
    return [("three pools", plan.apart), ("two pools", plan.two)]
