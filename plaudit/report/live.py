"""A live view of an RL run: a panel on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from plaudit.report.curve import Curve, sparkline
from plaudit.report.finding import number, percent
from plaudit.report.history import History
from plaudit.report.rules.integrity import GAMED, WATCHED

Metrics = Mapping[str, float]
Seconds = Callable[[], float]

# Metric, its name in the panel and in a line, its format.
_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", number),
    ("accuracy", "right", percent),
    ("kl/reference", "KL", number),
    ("policy/entropy", "entropy", number),
    ("length/mean", "length", number),
    ("length/truncated", "cut off", percent),
    ("mismatch/abs_mean", "mismatch", number),
    ("value/explained_variance", "critic", number),
    ("staleness/mean", "staleness", number),
    ("loss", "loss", number),
)
_PHASE_COLOURS = ("cyan", "yellow", "blue", "magenta", "green", "red")
_BAR, _RECENT = 48, 20
SECONDS_PER_LINE, _SECONDS_PER_DRAWING = 5.0, 0.2


class LiveView:
    """The interface of `Progress`: `bar` around the run, then `step`, `figures` and `warn` as they arrive."""

    def __init__(self, title: str, console: Console | None = None, clock: Seconds = time.monotonic) -> None:
        self.title = title
        self.console = console or Console(stderr=True)
        self.clock = clock
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._latest: dict[str, float] = {}
        self._held_out: tuple[int, dict[str, float]] | None = None
        self._done = self._total = 0
        self._ticks: list[tuple[int, float]] = [(0, clock())]
        self._last_line = self._drawn = -math.inf
        self._live: Live | None = None
        self._warned: set[str] = set()

    @contextmanager
    def bar(self, done: int, total: int) -> Iterator[None]:
        self.expect(done, total)
        if not self.console.is_terminal:
            yield
            return
        # Drawn by the thread that provides the numbers, never concurrently. The last state stays on the screen.
        with Live(get_renderable=self.panel, console=self.console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def expect(self, done: int, total: int) -> None:
        """Set the current and the final step; 0: unknown."""
        self._done, self._total = done, total
        self._ticks = [(done, self.clock())]

    def step(self, step: int, metrics: Metrics) -> None:
        self._done = step
        for name, value in metrics.items():
            self._latest[name] = float(value)
            self._series.setdefault(name, []).append((step, float(value)))
        self._watch()
        if step > self._ticks[-1][0]:
            self._ticks = [*self._ticks, (step, self.clock())][-_RECENT:]
        if not self.console.is_terminal and self.clock() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = self.clock()
            self._print(self.line())
        if self._live and time.monotonic() - self._drawn >= _SECONDS_PER_DRAWING:
            self._drawn = time.monotonic()
            self._live.refresh()

    def figures(self, step: int, figures: Metrics) -> None:
        self._held_out = (step, {name: float(value) for name, value in figures.items()})
        line = "  ".join(f"{name} {value:.3f}" for name, value in self._held_out[1].items())
        self._print(f"{self.title} step {step}: {line}")

    def warn(self, message: str) -> None:
        self.console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)

    def _watch(self) -> None:
        """Warn once about a reward that is being gamed."""
        curves = {name: Curve(*zip(*points, strict=True)) for name in WATCHED if (points := self._series.get(name))}
        for rule in GAMED:
            finding = rule(History(self.title, curves))
            if finding is not None and finding.severity != "fine" and finding.rule not in self._warned:
                self._warned.add(finding.rule)
                self.warn(f"{finding.rule}, since about step {finding.step}: {finding.says} {finding.cure}")

    def rewind(self, step: int) -> None:
        """The run has returned to this step: later figures are discarded."""
        for name, points in self._series.items():
            self._series[name] = [(at, value) for at, value in points if at <= step]
        self.expect(step, self._total)

    def close(self) -> None:
        """Print the last state if not on a terminal."""
        if not self.console.is_terminal:
            self._print(self.line())

    def line(self) -> str:
        """The run in one line."""
        parts = [f"{self.title} step {self._done}" + (f"/{self._total}" if self._total else "")]
        parts += [f"{called} {how(self._latest[name])}" for name, called, how in _SHOWN if name in self._latest]
        return "  ".join([*parts, *self._pace()])

    def panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        for name, called, how in _SHOWN:
            points = self._series.get(name, [])
            if points:
                drawn = sparkline([value for _, value in points], 32)
                table.add_row(Text(called, "dim"), Text(how(points[-1][1])), Text(drawn, "cyan"))
        if self._held_out:
            step, figures = self._held_out
            line = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            table.add_row(Text("held-out", "dim"), Text(f"step {step}"), Text(line))
        parts: list[Table | Text] = [table]
        if phases := self._phases():
            parts += [Text(), *phases]
        if self._total:
            done = min(_BAR, _BAR * self._done // self._total)
            parts += [Text(), Text.assemble(("━" * done, "green"), ("━" * (_BAR - done), "bright_black"))]
        line = f"step {self._done}" + (f" of {self._total}" if self._total else "")
        parts.append(Text("  ".join([line, *self._pace()]), "dim"))
        return Panel(Group(*parts), title=Text(self.title), title_align="left", border_style="dim", expand=False)

    def _pace(self) -> list[str]:
        parts = []
        if (rate := self._latest.get("perf/samples_per_second")) is not None:
            parts.append(f"{number(rate)} samples/s")
        (first, begin), (last, end) = self._ticks[0], self._ticks[-1]
        if self._total > self._done and last > first and end > begin:
            left = round((self._total - self._done) * (end - begin) / (last - first))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        return parts

    def _phases(self) -> list[Text]:
        """The time of the last steps: a bar of its phases, and their names."""
        spent = {
            name.removeprefix("time/"): sum(value for _, value in points[-_RECENT:] if math.isfinite(value))
            for name, points in self._series.items()
            if name.startswith("time/") and name != "time/step"
        }
        total = sum(spent.values())
        if not total:
            return []
        longest = sorted(spent.items(), key=lambda item: -item[1])
        longest = [(name, seconds) for name, seconds in longest if seconds >= total / 100][: len(_PHASE_COLOURS)]
        bar, names = Text(), Text()
        for (name, seconds), colour in zip(longest, _PHASE_COLOURS, strict=False):
            bar.append("█" * round(_BAR * seconds / total), colour)
            names.append("■ ", colour).append(f"{name} {percent(seconds / total)}  ")
        return [bar, names]

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)
