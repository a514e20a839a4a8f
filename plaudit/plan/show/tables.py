"""Sweeps over numbers of nodes and over utilisations, in the terminal and as data."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.plan.show.as_data import plan_data
from plaudit.plan.show.listing import new_console, seconds
from plaudit.plan.sweep import Row, Sweep
from plaudit.plan.utilisation import Loads

EFFICIENCY = "per device: speed of a device over that of one in the smallest number of the same accelerator that fits"
FULL = "1.0 in serving: as many sequences as the cache of every engine holds, requests always waiting"


def dollars(value: float | None) -> str:
    return "—" if value is None else f"{value:,.2f}"


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def print_sweep(swept: Sweep, console: Console | None = None) -> None:
    console = console or new_console()
    console.print(f"[bold]{escape(swept.headline)}[/bold]", highlight=False, soft_wrap=True)
    for title, ours in (("By Plaudit's own trainer", True), ("By any software", False)):
        if rows := swept.rows(ours):
            table = _table(title, ("hardware", "placement", "generation", "training"),
                           ("step s", "per device", "$/h", "$/M tokens"))  # fmt: skip
            for row in rows:
                plan = row.prediction.plan
                split = "" if plan.shared else f" {plan.generation_cluster.devices}+{plan.cluster.devices}"
                table.add_row(
                    row.place.name, f"{plan.placement}{split}", f"{plan.replicas} × {plan.generation}",
                    str(plan.training), seconds(row.prediction.step.value), f"{row.efficiency:.0%}",
                    dollars(row.hourly), dollars(row.million_tokens),
                )  # fmt: skip
            console.print(table)
    if refused := [point.place.name for point in swept.points if not point.result.plans]:
        console.print(f"nothing fits on {', '.join(refused)}", highlight=False, soft_wrap=True)
    for line in (EFFICIENCY, swept.question.price_basis):
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)


def sweep_data(swept: Sweep) -> dict[str, Any]:
    return {
        "headline": swept.headline,
        "price": swept.question.price,
        "price_basis": swept.question.price_basis,
        "own_trainer": [_row_data(row) for row in swept.rows(True)],
        "any_software": [_row_data(row) for row in swept.rows(False)],
        "nothing_fits": [point.place.name for point in swept.points if not point.result.plans],
    }


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "hardware": row.place.name, "nodes": row.place.nodes, "devices": row.place.devices,
        "step_seconds": row.prediction.step.value, "efficiency_per_device": row.efficiency,
        "dollars_per_hour": row.hourly, "dollars_per_million_tokens": row.million_tokens,
        "plan": plan_data(row.prediction),
    }  # fmt: skip


def print_loads(loaded: Loads, console: Console | None = None) -> None:
    console = console or new_console()
    for name, best in loaded.trained.items():
        server = loaded.served[name]
        rows = [load for load in loaded.loads if load.place.name == name]
        table = _table(
            name, (),
            ("utilisation", "training $/M tokens", "serving $/M tokens", "served tok/s", "at once", "ms/token"),
        )  # fmt: skip
        for load in rows:
            table.add_row(
                f"{load.utilisation:.0%}", dollars(load.training), dollars(load.serving),
                f"{load.tokens_per_second:,.0f}", f"{load.sequences:,.1f}", f"{load.token_seconds * 1e3:.1f}",
            )  # fmt: skip
        console.print(table)
        trainer = "Plaudit's own trainer" if best.runnable else "other software"
        console.print(f"[dim]training: {best.plan}, {trainer}; serving: {server.replicas} × {server.replica.layout}, "
                      f"requests of {server.prompt:g} + {server.response:g} tokens[/dim]", highlight=False,
                      soft_wrap=True)  # fmt: skip
    without = [place.name for place in loaded.question.clusters if place.name not in loaded.trained]
    if without:
        console.print(f"nothing fits on {', '.join(without)}", highlight=False)
    for line in (FULL, loaded.question.price_basis):
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)


def loads_data(loaded: Loads) -> dict[str, Any]:
    return {
        "price": loaded.question.price,
        "price_basis": loaded.question.price_basis,
        "loads": [
            {"hardware": load.place.name, "utilisation": load.utilisation,
             "training_dollars_per_million_tokens": load.training,
             "serving_dollars_per_million_tokens": load.serving, "served_tokens_per_second": load.tokens_per_second,
             "sequences_at_once": load.sequences, "seconds_per_token": load.token_seconds}
            for load in loaded.loads
        ],
        "training_plans": {name: plan_data(best) for name, best in loaded.trained.items()},
        "serving": {name: {"replicas": server.replicas, "layout": str(server.replica.layout)}
                    for name, server in loaded.served.items()},
    }  # fmt: skip
