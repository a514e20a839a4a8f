"""Shows the figures of `plaudit bench weights` as a table and as an SVG."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10

from rich.console import Console
from rich.table import Table

from plaudit.bench.weights import WeightsResult

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 150, 96, 54, 44
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#22201d}.soft{fill:#6b665e;font-size:11px}.grid{stroke:#e4e0d8}"
    ".bar{fill:#0f766f}.limit{stroke:#c2541f;stroke-width:3}.paper{fill:#fbfaf7}"
)


def print_weights(result: WeightsResult, console: Console | None = None) -> None:
    console = console or Console()
    title = f"{result.parameters / 1e6:.0f}M parameters, {result.dtype}, {size(result.bytes)}, on {result.device}"
    table = Table(title=title, title_style="dim", title_justify="left", box=None, pad_edge=False)
    for name, justify in (
        ("channel", "left"), ("seconds", "right"), ("GB/s", "right"), ("limit", "left"), ("seconds", "right"),
        ("share", "right"), ("extra memory", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in result.rows:
        table.add_row(
            row.channel, seconds(row.seconds), "–" if row.gb_per_s is None else f"{row.gb_per_s:.2f}", row.limit,
            seconds(row.limit_seconds), "–" if row.share is None else f"{row.share:.0%}", size(row.extra_bytes),
        )  # fmt: skip
    console.print(table)
    if result.load > 1:
        console.print(
            f"The machine was busy (load {result.load:g} before the start): repeat the benchmark when it is idle."
        )


def draw_weights(result: WeightsResult) -> str:
    """An SVG: the duration of a transfer on a logarithmic scale, with a mark for each limit."""
    times = [t for row in result.rows for t in (row.seconds, row.limit_seconds)]
    low, high = floor(log10(min(times))), ceil(log10(max(times)))
    height = TOP + ROW * len(result.rows) + 30

    def x(t: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(t) - low) / max(high - low, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text x="12" y="22">Seconds to publish {size(result.bytes)} ({result.parameters / 1e6:.0f}M parameters, '
        f"{escape(result.dtype)}) to one engine</text>",
        f'<text x="12" y="40" class="soft">{escape(result.device)}, {escape(result.machine)}; mark: the measured '
        "limit</text>",
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - 22}"/>')
        parts.append(f'<text class="soft" x="{at:.1f}" y="{height - 8}" text-anchor="middle">{10.0**power:g} s</text>')
    for number, row in enumerate(result.rows):
        top = TOP + ROW * number + 8
        end, mark = x(row.seconds), x(row.limit_seconds)
        share = "moves nothing" if row.share is None else f"{row.share:.0%} of the limit"
        parts.append(f'<text x="{LEFT - 10}" y="{top + 17}" text-anchor="end">{escape(row.channel)}</text>')
        parts.append(f'<rect class="bar" x="{LEFT}" y="{top}" width="{max(end - LEFT, 1):.1f}" height="26" rx="2"/>')
        parts.append(f'<line class="limit" x1="{mark:.1f}" x2="{mark:.1f}" y1="{top - 3}" y2="{top + 29}"/>')
        parts.append(f'<text x="{max(end, mark) + 8:.1f}" y="{top + 12}">{seconds(row.seconds)}</text>')
        parts.append(f'<text class="soft" x="{max(end, mark) + 8:.1f}" y="{top + 26}">{share}</text>')
    return "\n".join([*parts, "</svg>", ""])


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB" if count else "0"
