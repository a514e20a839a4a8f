"""Progress display of a run: a bar on a terminal, one line per evaluation elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"), console=self.console, transient=True,
            disable=not self.console.is_terminal,
        )  # fmt: skip

    @contextmanager
    def bar(self, done: int, total: int) -> Iterator[None]:
        self._task = self._bar.add_task(self.title, total=total, completed=done, metrics="")
        with self._bar:
            yield

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = f"loss {metrics['loss']:.3f}" if "loss" in metrics else ""
        self._bar.update(self._task, completed=step, metrics=shown)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        self.console.print(f"[dim]{self.title}[/dim] step {step}: {text}", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{self.title}[/dim] {text}", highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {message}", highlight=False, soft_wrap=True)
