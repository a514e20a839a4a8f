"""Draws the plots of docs/benchmarks, one for each result file that exists; missing files are listed.

python benchmarks/plots.py [--results DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
Points = Sequence[tuple[float, float]]

WIDTH, EDGE, ROW, LETTER = 640, 12, 22, 6.6  # LETTER: approximate width of a character at 12 px
# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"
GREY, PALE, INK = "#9ca3af", "#e5e7eb", "#1f2937"

CORE = {  # target, stretch target
    "score 1B": (450, 520),
    "groups 1B": (520, 620),
    "generate 1B": (100_000, 130_000),
    "generate 135M": (180_000, 300_000),
}
SERVERS = {"core": "core, no HTTP", "plaudit": "Plaudit", "fastapi": "FastAPI"}
OWNERS = {  # by the last word of an owner's name
    "weights": ("weights", "shards"), "optimizer, masters": ("optimizer", "masters"), "gradients": ("gradients",),
    "KV": ("KV",), "activations": ("activations",),
}  # fmt: skip
OUTSIDE = ("evaluate", "checkpoint")  # of a step


@dataclass(frozen=True)
class Bar:
    """Parts are stacked along the bar; marks are lines across it. Both use the colour that the plot assigns to their
    name."""

    label: str
    parts: Mapping[str, float]
    text: str
    marks: Mapping[str, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return max(sum(self.parts.values()), *self.marks.values(), 0.0)


@dataclass(frozen=True)
class Chart:
    """whiskers: x, lower and upper end. since: where on the x axis an event starts, and its name."""

    y: str
    lines: Mapping[str, Points]
    levels: Mapping[str, float] = field(default_factory=dict)
    whiskers: Sequence[tuple[float, float, float]] = ()
    since: tuple[float, str] | None = None


def words(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" {more}/>'


def block(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def picture(title: str, key: Mapping[str, str], thin: set[str], height: float, parts: Sequence[str]) -> str:
    """A complete SVG file: the title, the legend and the drawing below them."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        block(0, 0, WIDTH, height, "white"),
        words(EDGE, 20, title, more='font-weight="bold"'),
    ]
    x = float(EDGE)
    for name, colour in key.items():
        head += [block(x, 32, 3 if name in thin else 10, 10, colour), words(x + 15, 41, name)]
        x += 30 + LETTER * len(name)
    return "\n".join([*head, *parts, "</svg>", ""])


def bars(
    title: str, panels: Mapping[str, Sequence[Bar]], key: Mapping[str, str], columns: int = 2, one_scale: bool = False
) -> str:
    """One panel per title, each with its own scale where units differ."""
    every = [bar for found in panels.values() for bar in found]
    label = LETTER * max(len(bar.label) for bar in every) + 8
    text = LETTER * max(len(bar.text) for bar in every) + 8
    across = (WIDTH - EDGE) / columns
    lines = [list(panels.items())[i : i + columns] for i in range(0, len(panels), columns)]
    parts, top = [], 58.0
    for line in lines:
        for column, (name, found) in enumerate(line):
            left = EDGE + across * column
            parts.append(words(left, top + 10, name, more='font-weight="bold"'))
            longest = max(bar.end for bar in (every if one_scale else found))
            parts += rows(found, left + label, top + 18, (across - EDGE - label - text) / max(longest, 1e-9), key)
        top += 34 + ROW * max(len(found) for _, found in line)
    thin = {name for bar in every for name in bar.marks}
    return picture(title, key, thin, top, parts)


def rows(found: Sequence[Bar], zero: float, top: float, scale: float, key: Mapping[str, str]) -> list[str]:
    """Bars below each other, starting at x = `zero`, `scale` pixels per unit."""
    parts = []
    for number, bar in enumerate(found):
        x, y = zero, top + 2 + ROW * number
        parts.append(words(zero - 6, y + 12, bar.label, anchor="end"))
        for name, value in bar.parts.items():
            parts.append(block(x, y, value * scale, ROW - 6, key[name]))
            x += value * scale
        for name, value in bar.marks.items():
            at = zero + value * scale
            parts.append(stroke(at, y - 2, at, y + ROW - 4, key[name], 'stroke-width="3"'))
        parts.append(words(zero + bar.end * scale + 6, y + 12, bar.text))
    return [*parts, stroke(zero, top, zero, top + ROW * len(found), INK)]


def charts(title: str, x_label: str, found: Sequence[Chart], key: Mapping[str, str], height: float = 240) -> str:
    """Lines over one x axis, with the charts stacked vertically."""
    longest = max(x for chart in found for points in chart.lines.values() for x, _ in points)
    parts, top, left, right = [], 62.0, 64, WIDTH - EDGE - 8
    marks = [x for x in ticks(0, longest, 8) if x <= longest]

    def across(x: float) -> float:
        return left + (right - left) * x / longest

    for chart in found:
        parts += lines(chart, across, top, height, right, key)
        parts += [stroke(across(x), top + height, across(x), top + height + 4, INK) for x in marks]
        top += height + 24
    parts += [words(across(x), top - 6, f"{x:g}", anchor="middle") for x in marks]
    parts.append(words((left + right) / 2, top + 14, x_label, anchor="middle"))
    return picture(title, key, set(), top + 24, parts)


def lines(
    chart: Chart, across: Callable[[float], float], top: float, height: float, right: float, key: Mapping[str, str]
) -> list[str]:
    ends = [end for _, *ends in chart.whiskers for end in ends]
    values = [*(y for points in chart.lines.values() for _, y in points), *chart.levels.values(), *ends, 0.0]
    marks = ticks(min(values), max(values), 5)
    left, low, high = across(0), marks[0], marks[-1]

    def up(y: float) -> float:
        return top + height * (high - y) / (high - low)

    middle = top + height / 2
    more = f'transform="rotate(-90 16 {middle:.1f})"'
    parts = [words(16, middle, chart.y, anchor="middle", more=more)]
    for y in marks:
        parts += [stroke(left, up(y), right, up(y), PALE), words(left - 8, up(y) + 4, f"{y:g}", anchor="end")]
    for name, y in chart.levels.items():
        parts.append(stroke(left, up(y), right, up(y), INK, 'stroke-dasharray="5 4"'))
        parts.append(words(left + 6, up(y) + 15, f"{name} {y:g}"))
    if chart.since:
        x, label = across(chart.since[0]), chart.since[1]
        after = x + LETTER * len(label) < right
        parts.append(stroke(x, top, x, top + height, RED, 'stroke-width="1.5" stroke-dasharray="5 4"'))
        parts.append(words(x + (6 if after else -6), top + 12, label, anchor="start" if after else "end"))
    parts += [stroke(across(x), up(lower), across(x), up(upper), GREY) for x, lower, upper in chart.whiskers]
    for name, points in chart.lines.items():
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{key[name]}" stroke-width="2"/>')
    return [*parts, stroke(left, top, left, top + height, INK), stroke(left, up(low), right, up(low), INK)]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, with at most that many steps between."""
    power = 10.0 ** math.floor(math.log10(max(high - low, 1e-9) / most))
    step = next(power * by for by in (1, 2, 5, 10) if (high - low) / (power * by) <= most)
    return [round(n * step, 12) for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def core(record: Record) -> str:
    panels = {}
    for work, (target, stretch) in CORE.items():
        found = record["results"][work]
        found_by = {"Plaudit": found["value"]}
        if "transformers" in found:
            found_by["transformers"] = found["transformers"]
        panels[f"{work}, {found['unit']}"] = [
            Bar(name, {"Plaudit" if name == "Plaudit" else "others": value}, figure(value),
                {"target": target, "stretch target": stretch} if name == "Plaudit" else {})
            for name, value in found_by.items()
        ]  # fmt: skip
    title = f"Speed of the core, {record['machine']}, {record['date'][:10]}"
    return bars(title, panels, {"Plaudit": BLUE, "others": GREY, "target": ORANGE, "stretch target": RED})


def serving(record: Record) -> str:
    panels: dict[str, list[Bar]] = {}
    shown = ("core", "plaudit", *record["rivals"])  # a rival whose version is not recorded is not shown
    for row in (row for row in record["rows"] if row["server"] in shown and not row["run"]):
        latency = f", p50 {figure(row['p50 ms'])} ms, p99 {figure(row['p99 ms'])} ms" if "p50 ms" in row else ""
        name = SERVERS[row["server"]]
        bar = Bar(name, {name: row["samples/s"]}, figure(row["samples/s"]) + latency)
        panels.setdefault(f"{row['load']}, samples/s", []).append(bar)
    colours = {SERVERS[name]: colour for name, colour in zip(SERVERS, (SKY, BLUE, GREY), strict=True) if name in shown}
    return bars(f"The reward server, {record['machine']}, {record['date'][:10]}", panels, colours, columns=1)


def learning(record: Record) -> str:
    seeds = {f"seed {seed}": [(s, reward) for _, s, reward in run["heldout"]] for seed, run in record["seeds"].items()}
    key = dict(zip(seeds, (BLUE, ORANGE, GREEN, PURPLE, RED, SKY), strict=False))
    title = f"GRPO on SmolLM2-135M, {record['machine']}, {record['date'][:10]}"
    return charts(title, "seconds of training", [Chart("held-out reward", seeds)], key)


def against_trl(record: Record) -> str:
    sides = {"Plaudit": "plaudit", "TRL": "trl"}
    found = {name: [(step["at"], step["reward"]) for step in record[side]["steps"]] for name, side in sides.items()}
    chart = Chart("reward of the training samples", found, {"target": record["target"]})
    title = f"GRPO on SmolLM2-135M against TRL, {record['machine']}, {record['date'][:10]}"
    return charts(title, "seconds of training", [chart], {"Plaudit": BLUE, "TRL": ORANGE})


def over_optimisation(record: Record) -> str:
    run = record["runs"]["smollm2-ppo-rm"]
    step = run["over_optimised_from"]
    since = None if step is None else (step, f"over-optimised from step {step} on")
    both = zip(run["heldout/truth"], run["heldout/truth_se"], strict=True)
    whiskers = [(step, right - error, right + error) for (step, right), (_, error) in both]
    proxy = Chart("proxy", {"reward model, held out": run["heldout/reward"]}, since=since)
    truth = Chart("truth", {"share right, ± its standard error": run["heldout/truth"]}, whiskers=whiskers, since=since)
    key = {"reward model, held out": BLUE, "share right, ± its standard error": ORANGE}
    title = f"PPO against a learned reward, SmolLM2-135M, {run['date'][:10]}"
    return charts(title, "steps", [proxy, truth], key, height=150)


def placements(record: Record) -> str:
    spent = {"moves": "swap", "mode switches": "switch", "publishing": "publish"}
    seconds, peaks = [], []
    for placed in record["placements"]:
        if placed["error"] is not None:
            seconds.append(Bar(placed["placement"], {}, "did not run"))
            peaks.append(seconds[-1])
            continue
        step, peak = placed["seconds_per_step"], placed["peak_bytes"] / 1e9
        others = {name: placed[f"{key}_seconds_per_step"] for name, key in spent.items()}
        seconds.append(Bar(placed["placement"], {"work": step - sum(others.values()), **others}, figure(step)))
        peaks.append(Bar(placed["placement"], {"memory": peak}, f"{figure(peak)}, in {placed['peak_phase']}"))
    key = {"work": BLUE, "moves": ORANGE, "mode switches": PURPLE, "publishing": GREEN, "memory": GREY}
    panels = {"seconds of a step": seconds, "peak of memory, GB": peaks}
    return bars(f"Placements, {Path(record['recipe']).stem}, {record['date'][:10]}", panels, key, columns=1)


def memory(record: Record) -> str:
    panels = {}
    for placed in record["placements"]:
        phases = {phase: held for phase, held in placed["phases"].items() if phase not in OUTSIDE}
        planned = {phase: sum(held.values()) / 1e9 for phase, held in placed["planned"].items()}
        found = [
            Bar(phase.replace("_", " "), kinds(held), figure(sum(held.values()) / 1e9),
                {"planned": planned[phase]} if phase in planned else {})
            for phase, held in phases.items()
        ]  # fmt: skip
        if found:
            panels[f"{placed['placement']}, GB"] = found
    key = dict(zip(("other", *OWNERS), (GREY, BLUE, SKY, GREEN, PURPLE, ORANGE), strict=True))
    title = f"Memory of the phases of a step at their fullest, {Path(record['recipe']).stem}, {record['date'][:10]}"
    return bars(title, panels, {**key, "planned": INK}, one_scale=True)


def kinds(held: Mapping[str, int]) -> dict[str, float]:
    """GB by kind of owner, in the order in which they are stacked."""
    found = dict.fromkeys(("other", *OWNERS), 0.0)
    for owner, count in held.items():
        last = owner.split()[-1]
        found[next((kind for kind, ends in OWNERS.items() if last in ends), "other")] += count / 1e9
    return found


def channels(record: Record) -> str:
    panels = {}
    for row in record["rows"]:
        if row["gb_per_s"] is None:
            unit, ours, limit = "ms, no bytes move", row["seconds"] * 1e3, row["limit_seconds"] * 1e3
        else:
            unit, ours, limit = "GB/s", row["gb_per_s"], record["bytes"] / row["limit_seconds"] / 1e9
        panels[f"{row['channel']}, {unit}"] = [
            Bar("published", {"published": ours}, figure(ours)), Bar(row["limit"], {"limit": limit}, figure(limit)),
        ]  # fmt: skip
    size = f"{record['bytes'] / 1e9:.1f} GB"
    title = f"Weight channels between two processes, {size}, {record['device']}, {record['date'][:10]}"
    return bars(title, panels, {"published": BLUE, "limit": GREY})


PICTURES: dict[str, tuple[str, Callable[[Record], str]]] = {  # by plot name: the result file and the drawing function
    "core_gpu": ("core_gpu", core),
    "serving_gpu": ("serving_gpu", serving),
    "smollm2-grpo": ("smollm2-grpo", learning),
    "smollm2-vs-trl": ("smollm2_vs_trl", against_trl),
    "smollm2-ppo-rm": ("smollm2-ppo-rm", over_optimisation),
    "placements_gpu": ("memory_gpu", placements),
    "memory_gpu": ("memory_gpu", memory),
    "weights_gpu": ("weights_gpu", channels),
}


def draw_all(results: Path, out: Path) -> None:
    for name, (source, draw) in PICTURES.items():
        file = results / f"{source}.json"
        if file.exists():
            (out / f"{name}.svg").write_text(draw(json.loads(file.read_text())))
            print(f"{name}.svg")
        else:
            print(f"{name}.svg: not drawn, there is no {file.name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    draw_all(options.results, options.out)
