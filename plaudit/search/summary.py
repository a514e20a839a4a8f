"""Terminal output of a search: a progress bar, a summary, and the error of a search without answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plaudit.errors import NoAnswer
from plaudit.records import Z_95


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, otherwise nothing; called with the number of finished questions and the total."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def summary_text(figures: Mapping[str, Any]) -> str:
    lines = [f"{figures['method']}, width {figures['width']}: {figures['questions']} questions"]
    if (choice := figures.get("choice")) is not None:
        lines.append(f"  chosen because    {choice['why']}")
        if spent := choice["discarded"].get("generated"):
            lines.append(
                f"  pilot             {spent:,} more generated tokens, of searches whose results are discarded"
            )
    if "accuracy" in figures:
        lines.append(f"  accuracy          {figures['accuracy']:.3f} ± {Z_95 * figures['accuracy_se']:.3f} (95 %)")
    else:
        lines.append(f"  answered          {figures['answered']} of {figures['questions']}")
    for name, key in (("KV tokens", "kv_tokens"), ("generated tokens", "generated_tokens"), ("calls", "calls")):
        lines.append(f"  {name:17} {figures.get(key, 0):,}")
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in figures["phases"].items())
    lines.append(f"  {'seconds':17} {figures['seconds']:.1f}: {phases}")
    if figures["programme_share"]:
        lines.append(
            f"  {'share':17} integer programs and clustering take {figures['programme_share']:.1%} of the time"
        )
    for reason, count in figures.get("no_answer", {}).items():
        lines.append(f"  no answer         {count} of {figures['questions']} questions, most paths for: {reason}")
    over = {name: count for name, count in figures["stopped"].items() if name not in ("done", "no answer")}
    if over:
        lines.append(f"  ended otherwise   {', '.join(f'{name}: {count}' for name, count in over.items())}")
    if figures.get("unsolved"):
        lines.append(f"  integer programs not solved to optimality: {figures['unsolved']}")
    if figures.get("undecided"):
        lines.append(f"  answers that could not be compared: {figures['undecided']}")
    return "\n".join(lines)


def refuse_empty(searches: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises NoAnswer if one of these searches has answered none of its questions."""
    for directory, figures in searches.items():
        if figures["questions"] and not figures["answered"]:
            reasons = list(figures.get("no_answer", {})) or [name for name in figures["stopped"] if name != "done"]
            kind, _, name = reasons[0].partition(": ")
            keys = f"raise budget.{name}" if kind == "budget" else "check [steps] stop, answer, final and max_tokens"
            raise NoAnswer(
                f"no path of any question ended in an answer ({figures['method']}, {figures['questions']} questions): "
                f"{reasons[0]}; {keys}; all paths are in {directory / 'results.jsonl'}"
            )
