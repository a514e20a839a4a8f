"""A run compared with its plan, in the terminal and as data."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.plan.observed.comparison import Comparison, PhaseRow
from plaudit.plan.show.listing import new_console, seconds

FAR = 0.05
"""From this factor on a refit that does not match the run is reported."""


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    console = console or new_console()
    console.print(f"[bold]{escape(comparison.headline)}[/bold]", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    for heading in ("planned s", "measured s", "measured / planned", "after the refit s"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        table.add_row(row.name, seconds(row.planned), "—" if row.measured is None else seconds(row.measured),
                      f"{row.factor:.2f}" if row.factor else "—", seconds(row.refitted))  # fmt: skip
    console.print(table)
    for line in notes(comparison):
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)


def notes(comparison: Comparison) -> list[str]:
    measured, plan = comparison.measured, comparison.planned.plan
    work = comparison.planned.workload
    lines = [
        f"{measured.source}: median of {measured.steps} steps after the first; {work.batch} responses of "
        f"{work.prompt:.4g} + {work.response:.4g} tokens",
        f"plan: {plan}" + ("" if comparison.as_run else "; the fastest, which may not be the one that ran: set it with"
                           " --placement, --generation-layout and --training-layout"),
    ]  # fmt: skip
    spent = {"waiting for responses": measured.waited, "in no phase": measured.rest,
             "outside of any plan (evaluation, checkpoints, tools)": measured.outside}  # fmt: skip
    lines += [f"{name}: {seconds(value)} s" for name, value in spent.items() if value > 0.01 * measured.step]
    if comparison.changes:
        changed = (f"{name} {before:.3g} → {after:.3g}" for name, (before, after) in comparison.changes.items())
        lines.append(f"refitted constants: {', '.join(changed)}; --out FILE writes them as a --hardware-file")
    lines += [
        f"{name} = {after:.2f} is more than the whole: the hardware is faster than its data, or --hardware is not what "
        "it ran on" for name, (_, after) in comparison.changes.items() if name.endswith("_share") and after > 1
    ]  # fmt: skip
    return lines + [
        f"{row.name}: {seconds(row.refitted)} s after the refit and {seconds(row.measured or 0.0)} s measured; its "
        "constants would be 20 times off or more: is --hardware what it ran on?"
        for row in comparison.rows[:-1] if _missed(row)
    ]  # fmt: skip


def _missed(row: PhaseRow) -> bool:
    return bool(row.measured and row.planned and abs(row.refitted / row.measured - 1) > FAR)


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    measured, plan = comparison.measured, comparison.planned.plan
    return {
        "headline": comparison.headline, "source": measured.source, "steps": measured.steps, "plan": str(plan),
        "plan_as_run": comparison.as_run, "hardware": plan.hardware,
        "phases": [{"name": row.name, "planned": row.planned, "measured": row.measured, "factor": row.factor,
                    "refitted": row.refitted} for row in comparison.rows],
        "seconds_waiting": measured.waited, "seconds_outside": measured.outside, "seconds_in_no_phase": measured.rest,
        "constants": {name: {"before": before, "after": after}
                      for name, (before, after) in comparison.changes.items()},
    }  # fmt: skip
