"""Plans in the terminal: a ranked table, rejected plans with reasons, time per phase."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.question import Outcome
from plaudit.plan.residuals import error_bars

WIDE = 200


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def numbers(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def dollars(prediction: Prediction, price: str, what: str) -> str:
    term = getattr(prediction.cost, what).get(price)
    return f"{term.value:,.2f}" if term else "—"


def new_console() -> Console:
    # A file or a pipe has no width: rows stay whole.
    return Console(width=None if sys.stdout.isatty() else WIDE)


def print_outcome(outcome: Outcome, top: int = 10, console: Console | None = None) -> None:
    console = console or new_console()
    work = outcome.question.workload
    critic = f", critic {work.value_model.name}" if work.value_model else ""
    console.print(f"[bold]{escape(outcome.headline)}[/bold]", highlight=False, soft_wrap=True)
    console.print(
        f"{work.model.name}: {numbers(work.model.parameters)} parameters, "
        f"{numbers(work.model.active_parameters)} active; "
        f"{work.algorithm}{critic}; {work.batch} responses, {work.group} to a prompt, of "
        f"{work.prompt:g} + {work.response:g} tokens "
        f"(longest {work.longest:g}) a step", highlight=False, soft_wrap=True,
    )  # fmt: skip
    if len(outcome.results) > 1:
        _print_comparison(outcome, console)
    if outcome.nearest:
        _print_phases(outcome.nearest, console)
    if outcome.runnable:
        _print_runnable(outcome, top, console)
    if outcome.others:
        _print_others(outcome, top, console)
    for place, result in outcome.results.items():
        for rejection in result.rejected:
            console.print(f"[dim]{place}[/dim] {rejection.placement}: {rejection.reason} "
                          f"({rejection.factor:.2f} times too much)", highlight=False, soft_wrap=True)  # fmt: skip
    console.print(f"[dim]{escape(outcome.question.price_basis)}[/dim]", highlight=False, soft_wrap=True)
    tried = sum(result.tried for result in outcome.results.values())
    console.print(f"[dim]{tried} plans tried[/dim]", highlight=False, soft_wrap=True)


def _print_others(outcome: Outcome, top: int, console: Console) -> None:
    """Print one row for each set of features that Plaudit's trainer lacks."""
    ours = outcome.runnable[0].step.value if outcome.runnable else None
    title = "With other software: what Plaudit's own trainer does not run, and what it lacks for that"
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False)
    for heading, side in (
        ("placement", "left"), ("generation", "left"), ("training", "left"), ("step s", "right"),
        *([("against ours", "right")] if ours else []),
        ("$/M tokens", "right"), ("peak GB", "right"), ("plans", "right"), ("missing", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    kinds = outcome.kinds_of_others()
    for p, alike in kinds[:top]:
        table.add_row(
            *_names(p, outcome), seconds(p.step.value), *([f"{ours / p.step.value:.2f}×"] if ours else []),
            dollars(p, outcome.question.price, "million_tokens"), f"{p.peak.value / 1e9:.0f}", str(alike),
            ", ".join(p.missing),
        )  # fmt: skip
    console.print()
    console.print(table)
    if len(kinds) > top:
        console.print(f"[dim]and {len(kinds) - top} more kinds, all slower; --json has them[/dim]", highlight=False)
    if not outcome.runnable:
        _print_phases(outcome.best, console)


def _names(p: Prediction, outcome: Outcome) -> tuple[str, str, str]:
    plan = p.plan
    where = f"{plan.cluster.accelerator.name} " if len(outcome.results) > 1 else ""
    split = "" if plan.shared else f" {plan.generation_cluster.devices}+{plan.cluster.devices}"
    return f"{where}{plan.placement}{split}", f"{plan.replicas} × {plan.generation}", str(plan.training)


def _print_runnable(outcome: Outcome, top: int, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading, side in (
        ("#", "right"), ("placement", "left"), ("generation", "left"), ("training", "left"), ("step s", "right"),
        ("$/step", "right"), ("$/M tokens", "right"), ("tok/s/GPU", "right"), ("peak GB", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    price = outcome.question.price
    for rank, p in enumerate(outcome.runnable[:top], 1):
        table.add_row(
            str(rank), *_names(p, outcome), seconds(p.step.value), dollars(p, price, "step"),
            dollars(p, price, "million_tokens"), f"{p.cost.tokens_per_device:,.0f}",
            f"{p.peak.value / 1e9:.0f}",
        )  # fmt: skip
    console.print(table)
    _print_phases(outcome.best, console)


def _print_comparison(outcome: Outcome, console: Console) -> None:
    """Accelerators side by side, by one trainer at a time."""
    price = outcome.question.price
    lines = []
    if ours := outcome.best_of_each(runnable=True):
        lines += _by_time_and_cost(ours, price, "")
        without = [name for name, result in outcome.results.items() if not any(p.runnable for p in result.plans)]
        lines += [f"with none that our trainer runs: {', '.join(without)}"] if without else []
    best = outcome.best_of_each()
    lines += _by_time_and_cost(best, price, " with any software")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _by_time_and_cost(best: list[Prediction], price: str, how: str) -> list[str]:
    by_time = sorted(best, key=lambda p: p.step.value)
    priced = [p for p in best if price in p.cost.step]
    by_cost = sorted(priced, key=lambda p: p.cost.million_tokens[price].value)
    times = (f"{p.plan.cluster.accelerator.name} {seconds(p.step.value)} s" for p in by_time)
    costs = (f"{p.plan.cluster.accelerator.name} ${p.cost.million_tokens[price].value:.2f}/M tokens" for p in by_cost)
    return [f"by time{how}: {', '.join(times)}", f"by cost{how}: {', '.join(costs) or 'no price'}"]


def _print_phases(best: Prediction, console: Console) -> None:
    table = Table(
        title=f"the {'nearest' if best.shortages else 'first'} plan by phase",
        title_style="dim",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("phase", "on"):
        table.add_column(heading)
    for heading in ("seconds", "GB per device"):
        table.add_column(heading, justify="right")
    table.add_column("largest parts")
    for phase in best.phases:
        largest = sorted(phase.memory.parts, key=lambda part: -part.value)[:3]
        most = ", ".join(f"{part.name} {part.value / 1e9:.1f}" for part in largest)
        table.add_row(phase.name, phase.pool, seconds(phase.seconds.value), f"{phase.memory.value / 1e9:.1f}", most)
    console.print(table)
    for lack in best.shortages:
        console.print(f"does not fit: {lack} ({lack.factor:.2f} times too much)", highlight=False, soft_wrap=True)
    host = f", host memory {best.host.value / 1e9:,.0f} GB of a node" if best.host.value else ""
    waits = f", the trainer waits {best.trainer_waits:.0%} of the time" if best.plan.placement == "async" else ""
    waves = f" in {best.waves:.1f} waves" if best.waves > 1.05 else ""
    note = f"; {best.note}" if best.note else ""
    console.print(
        f"[dim]{best.concurrency:,.0f} sequences fit in a replica's cache{waves}{host}{waits}{note}[/dim]",
        highlight=False,
    )
    bars = "; ".join(map(str, error_bars(best)))
    console.print(f"[dim]error against published runs: {bars}[/dim]", highlight=False, soft_wrap=True)
