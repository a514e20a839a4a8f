"""A reward service in the terminal and as data."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.plan.capacity import Demand, Service
from plaudit.plan.show.listing import new_console

DELAY = "batch delay 0: a replica scores what came in while its last step ran"

CHECKED = (
    "measured on one H200 with 1B: 434 items per second, 262 in a shorter run, where 369 are planned; percentiles are "
    "simulated and not measured; other accelerators are extrapolated"
)


def headline(demand: Demand, best: Service) -> str:
    tp = best.scorer.replica.layout.tp
    each = f" over {tp} devices each" if tp > 1 else ""
    price = "" if best.per_million is None else f", ${best.per_million:,.2f} per million scores"
    return (f"{best.replicas} replicas on {best.chip.name}{each} answer {demand.rate:g} items/s with a 99th percentile "
            f"of {1e3 * best.traffic.p99:.3g} ms{price}")  # fmt: skip


def print_service(demand: Demand, services: list[Service], refused: dict[str, str], top: int) -> None:
    console: Console = new_console()
    console.print(f"[bold]{escape(headline(demand, services[0]))}[/bold]", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("accelerator")
    for heading in ("replicas", "tp", "p50 ms", "p99 ms", "in a step", "busy", "$/h", "$/M scores", "range"):
        table.add_column(heading, justify="right")
    for s in services[:top]:
        ends = "–".join(f"{end:,.2f}" for end in s.range) if s.range else "one source" if s.hourly is not None else "—"
        table.add_row(
            s.chip.name, str(s.replicas), str(s.scorer.replica.layout.tp), f"{1e3 * s.traffic.p50:.3g}",
            f"{1e3 * s.traffic.p99:.3g}", f"{s.traffic.batch:.1f}", f"{s.traffic.busy:.0%}",
            "—" if s.hourly is None else f"{s.hourly:,.2f}", "—" if s.per_million is None else f"{s.per_million:,.2f}",
            ends,
        )  # fmt: skip
    console.print(table)
    lines = [f"{name}: {why}" for name, why in refused.items()]
    lines += [f"{DELAY}; {services[0].servers} HTTP process(es)", CHECKED, demand.question.price_basis]
    for line in lines:
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)


def service_data(demand: Demand, services: list[Service], refused: dict[str, str]) -> dict[str, Any]:
    return {
        "headline": headline(demand, services[0]),
        "model": demand.question.workload.model.name, "rate": demand.rate, "p99_limit_seconds": demand.p99,
        "batch_delay_seconds": 0.0, "price": demand.question.price, "price_basis": demand.question.price_basis,
        "services": [
            {"accelerator": s.chip.name, "replicas": s.replicas, "tp": s.scorer.replica.layout.tp, "devices": s.devices,
             "p50_seconds": s.traffic.p50, "p99_seconds": s.traffic.p99, "items_in_a_step": s.traffic.batch,
             "busy": s.traffic.busy, "http_processes": s.servers, "dollars_per_hour": s.hourly,
             "dollars_per_million_scores": s.per_million,
             "dollars_per_million_scores_range": list(s.range) if s.range else None}
            for s in services
        ],
        "refused": refused,
    }  # fmt: skip
