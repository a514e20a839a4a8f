"""What to rent, in the terminal and as data."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.plan.market import Choice, Offer
from plaudit.plan.residuals import error_bars
from plaudit.plan.show.as_data import plan_data
from plaudit.plan.show.listing import new_console, seconds

ERROR = "error: median of step times against published runs; ?: extrapolated, none is on such an accelerator"
ENERGY = (
    "kWh: power of all devices at full load from the grid, times hours; published tokens per megawatt are missed by "
    "39 to 74 %, so read the order and not the amount"
)


def print_choice(choice: Choice, top: int, console: Console | None = None) -> None:
    console = console or new_console()
    console.print(f"[bold]{escape(choice.headline)}[/bold]", highlight=False, soft_wrap=True)
    for title, offers in (("By Plaudit's own trainer", choice.runnable), ("By any software", choice.any_software)):
        if offers:
            _print_offers(title, offers[:top], console)
    for line in (ERROR, choice.basis, ENERGY, f"{choice.tried} plans tried on {len(choice.results)} clusters"):
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)


def _print_offers(title: str, offers: list[Offer], console: Console) -> None:
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False)
    for heading in ("hardware", "placement", "generation", "training"):
        table.add_column(heading)
    for heading in ("step s", "error", "hours", "$/h", "$ of the run", "range", "$/M tokens", "kWh"):
        table.add_column(heading, justify="right")
    for offer in offers:
        plan, tokens = offer.prediction.plan, offer.prediction.workload.generated_tokens
        split = "" if plan.shared else f" {plan.generation_cluster.devices}+{plan.cluster.devices}"
        table.add_row(
            offer.place.name, f"{plan.placement}{split}", f"{plan.replicas} × {plan.generation}", str(plan.training),
            seconds(offer.prediction.step.value), _error(offer), f"{offer.hours:,.1f}", f"{offer.hourly:,.2f}",
            f"{offer.dollars:,.0f}", "–".join(f"{end:,.0f}" for end in offer.range) if offer.range else "one source",
            f"{offer.dollars / offer.prediction.workload.steps / tokens * 1e6:,.2f}",
            f"{offer.kwh:,.0f}" if offer.kwh else "—",
        )  # fmt: skip
    console.print(table)


def _error(offer: Offer) -> str:
    """The median of the step time's, marked where no published step is on such an accelerator."""
    (step,) = (bar for bar in error_bars(offer.prediction) if bar.kind == "step")
    return f"±{step.median:.0%}{' ?' if step.extrapolated else ''}"


def choice_data(choice: Choice) -> dict[str, Any]:
    market = choice.market
    return {
        "headline": choice.headline,
        "goal": market.goal,
        "budget_per_hour": market.budget if math.isfinite(market.budget) else None,
        "deadline_hours": market.deadline if math.isfinite(market.deadline) else None,
        "price": market.level,
        "price_basis": choice.basis,
        "without_price": list(market.silent),
        "own_trainer": [offer_data(offer) for offer in choice.runnable],
        "any_software": [offer_data(offer) for offer in choice.any_software],
        "notes": {"kwh": ENERGY},
        "tried": choice.tried,
    }


def offer_data(offer: Offer) -> dict[str, Any]:
    return {
        "hardware": offer.place.name, "hours": offer.hours, "dollars_per_hour": offer.hourly, "dollars": offer.dollars,
        "dollars_range": list(offer.range) if offer.range else None, "kwh": offer.kwh or None,
        "plan": plan_data(offer.prediction),
    }  # fmt: skip
