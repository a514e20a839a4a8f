"""Prints runs in the terminal: final figures, curves and diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plaudit.report.curve import Curve, sparkline
from plaudit.report.diagnosis import diagnose, verdict
from plaudit.report.finding import count, percent, size
from plaudit.report.history import FIGURES, History
from plaudit.report.memory import NOBODY, Timeline
from plaudit.report.searches.searches import Searched

COLOURS = {"bad": "red", "watch": "yellow", "fine": "green"}

# Curves of an RL run, with their labels.
_CURVES = {
    "reward/mean": "reward",
    "accuracy": "answers right",
    "kl/reference": "KL",
    "policy/entropy": "entropy",
    "length/mean": "length",
}
# Additional curves of a run with a truth.
_BESIDE_TRUTH = {"heldout/reward": "held-out", "heldout/truth": "its truth"}
_PHASES, _OWNERS = 4, 4


def print_report(runs: Sequence[History], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(title="on held-out items", title_style="dim", title_justify="left", box=None, pad_edge=False)
    for heading in ("run", "figure"):
        table.add_column(heading)
    table.add_column("value", justify="right")
    for run in runs:
        rows = [*_figures(run), *_curves(run), *_times(run)] or [("nothing measured", "")]
        for i, (what, value) in enumerate(rows):
            table.add_row("" if i else run.name, what, value, end_section=i == len(rows) - 1)
    console.print(table)
    for run in runs:
        if how := run.evaluated():
            console.print(Text(f"{run.name}: {how}", "dim"), soft_wrap=True)
    print_memory(runs, console)
    for run in runs:
        _print_diagnosis(run, console)


def _figures(run: History) -> list[tuple[str, str]]:
    """Each held-out figure: the last, preceded by the first if there are several."""
    figures = {name: curve for name, curve in run.held_out().items() if len(curve)}
    names = [*(name for name in FIGURES if name in figures), *sorted(set(figures) - set(FIGURES))]
    return [(FIGURES.get(name, name), _first_and_last(figures[name])) for name in names]


def _first_and_last(curve: Curve) -> str:
    last = f"{curve.values[-1]:.3f}"
    return f"{curve.values[0]:.3f} → {last}" if len(curve) > 1 else last


def _curves(run: History) -> list[tuple[str, str]]:
    if not run.reinforced:
        loss = run.curves.get("loss")
        return [(f"loss over {len(loss)} steps {sparkline(loss.finite)}", f"{run.seconds:.0f} s")] if loss else []
    rows = []
    drawn = _CURVES | _BESIDE_TRUTH if "heldout/truth" in run.curves else _CURVES
    for name, called in drawn.items():
        if curve := run.curve(name):
            rows.append((f"{called:13} {sparkline(curve.finite)}", f"{curve.early():.3g} → {curve.late():.3g}"))
    return [(f"over {count(run.steps, 'step')} of training:", f"{run.seconds:.0f} s"), *rows]


def _times(run: History) -> list[tuple[str, str]]:
    split = run.time_split() if run.phases() else {}
    total = sum(split.values())
    shares = [f"{name} {percent(seconds / total)}" for name, seconds in list(split.items())[:_PHASES]] if total else []
    return [("time: " + ", ".join(shares), "")] if shares else []


def print_memory(runs: Sequence[History], console: Console | None = None) -> None:
    console = console or Console()
    for run in runs:
        for line in run.memory:
            console.print(_memory(run, line))


def _memory(run: History, line: Timeline) -> Table:
    """Each phase at its peak; small owners are added up."""
    phases = line.by_phase()
    owners = [owner for owner in line.owners if owner not in NOBODY]
    most = {owner: max(usage.fullest.get(owner, 0) for usage in phases.values()) for owner in owners}
    named = sorted(sorted(most, key=lambda owner: -most[owner])[:_OWNERS], key=line.owners.index)
    rest = [owner for owner in line.owners if owner not in named]
    title = f"{run.name}: memory of {line.name}" if line.name else f"{run.name}: memory"
    table = Table(
        title=f"{title}, each phase at its fullest", title_style="dim", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("phase")
    for heading in ("total", *(["planned"] if line.planned else []), *named, *(["others"] if rest else [])):
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for phase, usage in phases.items():
        cells = [
            *(usage.fullest.get(owner, 0) for owner in named),
            *([sum(usage.fullest.get(o, 0) for o in rest)] if rest else []),
        ]
        style = "bold" if usage is line.peak else None
        if line.planned:
            cells = [sum(line.planned.get(phase, {}).values()), *cells]
        table.add_row(phase, size(usage.total), *(size(cell) if cell else "–" for cell in cells), style=style)
    return table


def _print_diagnosis(run: History, console: Console) -> None:
    findings = diagnose(run)
    severity, summary = verdict(run, findings)
    console.print(Text.assemble(f"{run.name}: ", (summary, COLOURS[severity])), soft_wrap=True)
    for sentence in run.proof:
        console.print(Text(f"  {sentence}", "dim"), soft_wrap=True)
    for finding in findings:
        if finding.severity != "fine":
            heading = (f"  {finding.rule}: ", COLOURS[finding.severity])
            console.print(Text.assemble(heading, finding.says, (f" {finding.cure}", "dim")), soft_wrap=True)


def print_searches(runs: Sequence[Searched], console: Console | None = None) -> None:
    """Searches side by side: their accuracy, and the cost of a question."""
    console = console or Console()
    table = Table(title="per question", title_style="dim", title_justify="left", box=None, pad_edge=False)
    table.add_column("run")
    for heading in ("method", "questions", "right (± 95 %)", "KV tokens", "generated", "calls", "seconds"):
        table.add_column(heading, justify="right")
    for run in runs:
        figures = run.figures
        right = "–" if "accuracy" not in figures else f"{figures['accuracy']:.3f} ± {run.margin:.3f}"
        costs = [f"{run.per_question(name):,.0f}" for name in ("kv_tokens", "generated_tokens", "calls")]
        table.add_row(
            run.name, run.label, str(figures["questions"]), right, *costs, f"{run.per_question('seconds'):.2f}"
        )
    console.print(table)
    for run in runs:
        if not run.figures.get("answered", 1):
            console.print(f"[red]{run.name}: no path of any question ended in an answer")
        if run.figures.get("failed"):
            console.print(f"[red]{run.name}: {count(run.figures['failed'], 'question')} failed; retry with --resume")
