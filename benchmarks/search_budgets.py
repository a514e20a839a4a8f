"""Effect of combined budgets of tokens, KV and seconds, and of stopping at a sufficient lead: every subset at equal
limits.

    python benchmarks/search_budgets.py [--questions 1000] [--minutes 15] [--processes 2]

The task is that of `search_world.py`, whose policy is a table and whose process model has a given AUC; questions need
4, 8, 12, 16 or 24 steps, so equal limits reach the long ones first. A limit is a share of what best-of-n of that
width uses on the mean question without limits, the same for all methods of the width. Seconds are modelled, not
measured: ROUND for each round (its decoding steps, one after the other) and STEP for each step of a path (the host's).

A budget only ends a search; everything before that is the same without it. So every question is searched once per
method and width, its cost and current answer are recorded before every round, and the result of each subset of limits
is derived from that record; some questions are searched again under real `[budget]` tables and must end at the derived
point. Written to benchmarks/results/search-budgets.json after every method and width; the next run continues from
there. `search_tables.py --write` puts it into docs/benchmarks/search.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from search_world import READING, Ground, World, search
from stamp import processor, stamp

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.output import written
from plaudit.search.drivers.driver import Driver
from plaudit.search.questions.answers import decided, winner
from plaudit.search.tree.costs import Costs

RESULTS = Path(__file__).parent / "results" / "search-budgets.json"
DEPTHS, ACCURACY, AUC = (4, 8, 12, 16, 24), 0.15, 0.9
METHODS: dict[str, dict[str, Any]] = {
    "best-of-n": {"method": "best-of-n"},
    "rebase": {"method": "rebase"},
    "ets": {"method": "ets", "clusters": "text"},
}
LIMITED = (16, 64)
WIDTHS = (*LIMITED, 4, 8, 32)  # the others without limits, as the alternative way to spend less
LIMITS = ("generated", "kv_tokens", "seconds")
SHARES = (0.5, 1.0, 1.5, 2.0)
LEADS = (False, True, 0.95)
ROUND, STEP = 0.020, 0.0002  # seconds: ten decoding steps of 2 ms; the host's 195 microseconds measured on an H200
CHECKED = 5  # number of questions, one of each depth, that are searched again under real tables


def model_time(costs: Costs) -> float:
    return ROUND * max(0, costs.rounds - 1) + STEP * costs.calls


@dataclass(frozen=True, slots=True)
class Point:
    """State of a search before a round: its cost, whether its answer would be right, and whether the lead of the vote
    is certain (1) or has probability 0.95 (0.95)."""

    generated: int
    kv_tokens: int
    seconds: float
    right: bool
    answered: bool
    lead: float


def world(question: int) -> World:
    return World(Ground(DEPTHS[question % len(DEPTHS)], ACCURACY), AUC, question)


def rule(method: str, width: int) -> SearchRuleTable:
    return SearchRuleTable(width=width, max_depth=1000, **METHODS[method])


def points(method: str, width: int, question: int) -> list[Point]:
    """The points of a whole search without limits."""
    found: list[Point] = []
    known: dict[int, tuple[bool, bool]] = {}  # by number of finished paths

    def note(driver: Driver) -> None:
        answers, costs = driver.answers(), driver.costs
        if len(answers) not in known:
            best = winner(answers, "weighted", READING.alike)
            known[len(answers)] = best is not None and best.text == "0", best is not None
        sure = next((p for p in (1.0, 0.95) if decided(answers, "weighted", driver.left(), READING.alike, p)), 0.0)
        found.append(Point(costs.generated, costs.kv_tokens, costs.seconds, *known[len(answers)], sure))

    search(world(question), rule(method, width), clock=model_time, on_round=note)
    return found


def ended(path: Sequence[Point], limits: dict[str, float], lead: bool | float) -> Point:
    """The point at which a search with these limits ends, by the rule of `Driver`."""
    for point in path:
        if any(getattr(point, name) >= limit for name, limit in limits.items()):
            return point
        if lead and point.lead >= float(lead):
            return point
    return path[-1]


def check(method: str, width: int, question: int, path: Sequence[Point], limits: dict[str, float]) -> None:
    """Checks that a real search under these limits ends at the same point."""
    for size, lead in itertools.product(range(1, 4), LEADS):
        for names in itertools.combinations(LIMITS, size):
            own = {name: limits[name] for name in names}
            whole = {name: math.ceil(v) if name != "seconds" else v for name, v in own.items()}
            budget = BudgetTable(lead=lead, **whole)  # type: ignore[arg-type]
            driver = search(world(question), rule(method, width), budget, clock=model_time)
            best, point = winner(driver.answers(), "weighted", READING.alike), ended(path, own, lead)
            real = driver.costs.generated, driver.costs.kv_tokens, best is not None and best.text == "0"
            assert real == (point.generated, point.kv_tokens, point.right), (method, width, question, own, lead)


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """A mean and half the width of its 95 % interval."""
    return fmean(values), 1.96 * (stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0)


def line(paths: Sequence[Sequence[Point]], limits: dict[str, float], lead: bool | float) -> dict[str, Any]:
    ends = [ended(path, limits, lead) for path in paths]
    accuracy, interval = mean_of([float(end.right) for end in ends])
    change, change_interval = mean_of([float(e.right) - float(p[-1].right) for e, p in zip(ends, paths, strict=True)])
    return {
        "limits": list(limits), "lead": lead, "accuracy": accuracy, "interval": interval, "change": change,
        "change_interval": change_interval, "answered": fmean(end.answered for end in ends),
        "cut": fmean(end is not path[-1] for end, path in zip(ends, paths, strict=True)),
        **{name: fmean(getattr(end, name) for end in ends) for name in LIMITS},
        **{f"most_{name}": max(getattr(end, name) for end in ends) for name in LIMITS},
    }  # fmt: skip


def measured(pool: Any, method: str, width: int, questions: int, whole: dict[str, float] | None) -> dict[str, Any]:
    """`whole`: the cost of best-of-n of this width without limits."""
    paths = pool.map(partial(points, method, width), range(questions), chunksize=5)
    lines = [{"share": None, **line(paths, {}, lead)} for lead in LEADS]
    whole = whole or {name: lines[0][name] for name in LIMITS}
    if width in LIMITED:
        for share in SHARES:
            limits = {name: share * whole[name] for name in LIMITS}
            for question in range(CHECKED if share == 1.0 else 0):
                check(method, width, question, paths[question], limits)
            for size, lead in itertools.product(range(1, 4), LEADS):
                for names in itertools.combinations(LIMITS, size):
                    lines.append({"share": share, **line(paths, {name: limits[name] for name in names}, lead)})
    return {"method": method, "width": width, "questions": questions, "whole": whole, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    end, cells = time.monotonic() + 60 * args.minutes, []
    if args.out.exists():
        cells = [cell for cell in json.loads(args.out.read_text())["cells"] if cell["questions"] == args.questions]
    done = {(cell["method"], cell["width"]): cell for cell in cells}
    with multiprocessing.Pool(args.processes) as pool:
        for width, method in itertools.product(args.widths, args.methods):
            if (method, width) in done or time.monotonic() > end:
                continue
            base = done.get(("best-of-n", width))
            found = measured(pool, method, width, args.questions, base and base["whole"])
            done[method, width] = found
            cells.append(found)
            first = found["lines"][0]
            print(f"width {width}, {method}: {first['accuracy']:.3f} ± {first['interval']:.3f}", flush=True)
            text = json.dumps({**stamp(__file__, processor(), {}), "model_time": {"round": ROUND, "step": STEP},
                               "depths": DEPTHS, "accuracy": ACCURACY, "auc": AUC, "cells": cells})  # fmt: skip
            with written(args.out) as file:
                file.write(text.replace('{"method"', '\n{"method"').replace('{"share"', '\n {"share"') + "\n")


if __name__ == "__main__":
    main()
