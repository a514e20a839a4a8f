"""When a tree beats best-of-n: accuracy at equal tokens by depth, policy accuracy and quality of the process model.

    python benchmarks/search_when.py [--questions 1000] [--minutes 15]      measures what is missing, then prints
    python benchmarks/search_when.py --minutes 0 --write                    writes docs/search-when.md, and
                                                                            plaudit/search/when.json for `--method auto`

Every cell is a ground, an AUC, a method and a width of `search_world.py`; questions come in batches of 125, the first
batch of all cells before the second of any. Results are stored in benchmarks/results/search-when.json after every round
of batches; the next run continues from there. One process, one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_world import READING, STEP_TOKENS, Ground, World, search
from stamp import commit, processor

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.output import written
from plaudit.search.questions.answers import winner
from plaudit.search.tree.apportion import even
from plaudit.search.tree.frontier import Choice, Frontier

RESULTS = Path(__file__).parent / "results" / "search-when.json"
PAGE = Path(__file__).parent.parent / "docs" / "search-when.md"
TABLE = Path(__file__).parent.parent / "plaudit" / "search" / "when.json"
BATCH = 125
GROUNDS = [Ground(8, 0.30), Ground(8, 0.05), Ground(24, 0.30), Ground(24, 0.05)]
AUCS = [0.55, 0.6, 0.7, 0.8, 0.9]
WIDTHS = (4, 16, 64, 256)
METHODS: dict[str, dict[str, Any]] = {
    "best-of-n": {"method": "best-of-n"},
    "beam": {"method": "beam", "distinct": True},
    "dvts": {"method": "dvts"},
    "rebase": {"method": "rebase"},
    "ets": {"method": "ets", "clusters": "text"},
    "ets, KV budget": {"method": "ets", "clusters": "text", "temperature": 1.0, "cluster_weight": 0.0},
    "discard": {"method": "rebase"},
    "best-of-n, lead": {"method": "best-of-n"},
    "best-of-n, lead 0.95": {"method": "best-of-n"},
    "rebase, lead": {"method": "rebase"},
    "rebase, lead 0.95": {"method": "rebase"},
}
CHEAP, DEAR = ("best-of-n", "beam", "dvts", "rebase"), ("ets", "ets, KV budget")
LEADS = [f"{name}, {lead}" for name in ("best-of-n", "rebase") for lead in ("lead", "lead 0.95")]
MAJORITY = "majority"  # the same samples as best-of-n, counted without the process model
TREES = (*CHEAP[1:], *DEAR)
SHOWN = (MAJORITY, CHEAP[0], *TREES)
READY = (*CHEAP, "ets")  # what a table can recommend: a KV budget needs its own size


def discard(frontier: Frontier) -> Choice:
    """The width is allocated evenly to the leaves that are still right by exact labels; if none is, to all."""
    right = [i for i, leaf in enumerate(frontier.leaves) if leaf.score == 1.0] or list(range(len(frontier.leaves)))
    counts = [0] * len(frontier.leaves)
    for i, count in zip(right, even(len(right), frontier.width), strict=True):
        counts[i] = count
    return Choice(counts)


def cells() -> Iterator[tuple[Ground, float, str, int, int]]:
    """(ground, AUC, method, width, maximum number of batches), most important first."""
    extremes = (GROUNDS[0], GROUNDS[-1])
    for ground in GROUNDS:
        yield from ((ground, auc, name, 16, 8) for auc in AUCS for name in CHEAP)
    for ground in extremes:  # exact labels
        yield from ((ground, 1.0, name, 16, 8) for name in (*CHEAP, "discard"))
        yield from ((ground, 1.0, name, 16, 2) for name in DEAR)
        yield ground, 1.0, "best-of-n", 64, 2
    yield from ((ground, 0.8, name, 16, 8) for ground in extremes for name in LEADS)
    yield from ((ground, auc, name, 16, 2) for ground in extremes for name in DEAR for auc in (0.6, 0.8))
    for ground in GROUNDS:
        yield from ((ground, auc, name, 4, 8) for auc in AUCS for name in CHEAP)
    for ground in extremes:
        yield from ((ground, auc, name, 64, 2) for auc in (0.6, 0.8) for name in CHEAP)
    yield from ((GROUNDS[0], 0.8, name, 256, 2) for name in CHEAP)


def measured(ground: Ground, auc: float, name: str, width: int, batch: int) -> list[dict[str, Any]]:
    """For a batch of questions: which were right, and the cost. Best-of-n's samples also as a majority vote."""
    keys = dict(METHODS[name])
    if name == "ets, KV budget":  # enough for a path of the usual length plus that many steps
        keys["kv_budget"] = round(24 + STEP_TOKENS * (1.2 * ground.depth + 4 * math.sqrt(width)))
    rule = SearchRuleTable(width=width, max_depth=1000, **keys)
    budget = BudgetTable(lead=0.95 if name.endswith("0.95") else name.endswith("lead"))
    rows = dict.fromkeys(("weighted", MAJORITY) if name == "best-of-n" else ("weighted",), "")
    generated = kv = 0
    for question in range(batch * BATCH, (batch + 1) * BATCH):
        driver = search(World(ground, auc, question), rule, budget, discard if name == "discard" else None)
        answers = driver.answers()
        for vote in rows:
            found = winner(answers, vote, READING.alike)  # type: ignore[arg-type]
            rows[vote] += str(int(found is not None and found.text == "0"))
        generated += driver.costs.generated
        kv += driver.costs.kv_tokens
    return [
        {"depth": ground.depth, "accuracy": ground.accuracy, "auc": auc, "width": width, "batch": batch,
         "method": MAJORITY if vote == MAJORITY else name, "right": right, "generated": generated, "kv_tokens": kv}
        for vote, right in rows.items()
    ]  # fmt: skip


def measure(questions: int, minutes: float, only: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "script": "benchmarks/search_when.py", "machine": processor(), "date": time.strftime("%Y-%m-%d"),
        "commit": commit(), "cpu_seconds": 0.0, "rows": [],
    }  # fmt: skip
    if RESULTS.exists():
        found = json.loads(RESULTS.read_text())
    rows: list[dict[str, Any]] = found["rows"]
    known = {(r["depth"], r["accuracy"], r["auc"], r["method"], r["width"], r["batch"]) for r in rows}
    end = time.monotonic() + 60 * minutes
    for batch in range(math.ceil(questions / BATCH)):
        for ground, auc, name, width, most in cells():
            named = f"{ground.name}, AUC {auc}, width {width}"
            done = (only and named not in only) or (ground.depth, ground.accuracy, auc, name, width, batch) in known
            if done or batch >= most or time.monotonic() > end:
                continue
            began = time.process_time()
            rows += measured(ground, auc, name, width, batch)
            if processor() not in found["machine"]:  # of results measured earlier
                found["machine"] += f"; {processor()}"
            found["cpu_seconds"] += time.process_time() - began
            print(f"{named}: {name}, batch {batch}", flush=True)
            with written(RESULTS) as file:
                text = json.dumps(found, separators=(",", ":"))
                file.write(text.replace('{"depth"', '\n{"depth"') + "\n")
    return found


def outcomes(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By (depth, accuracy, AUC, width, method): which questions were right, and the tokens."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: r["batch"]):
        key = tuple(row[name] for name in ("depth", "accuracy", "auc", "width", "method"))
        cell = cells.setdefault(key, {"right": "", "generated": 0, "kv_tokens": 0})
        for name in cell:
            cell[name] += row[name]
    return cells


def lead(cell: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """How far a method leads another on the questions that both ran, and half of its 95 % interval."""
    pairs = [int(a) - int(b) for a, b in zip(cell["right"], base["right"], strict=False)]
    mean = sum(pairs) / len(pairs)
    spread = math.sqrt(sum((each - mean) ** 2 for each in pairs) / max(1, len(pairs) - 1) / len(pairs))
    return mean, 1.96 * spread


def advice(leads: dict[str, tuple[float, float]]) -> str:
    """The method that leads best-of-n by more than its interval. If several do, the one whose interval starts furthest
    ahead, because they may have run on different numbers of questions. REBASE if that method does not lead REBASE by
    more than its interval: a trained process model misled beam and DVTS, and not REBASE (docs/benchmarks/search.md)."""
    ahead = {name: mean - half for name, (mean, half) in leads.items() if mean > half and name in READY}
    if not ahead:
        return CHEAP[0]
    best = max(ahead, key=ahead.__getitem__)
    return "rebase" if "rebase" in ahead and leads["rebase"][0] >= ahead[best] else best


def table(found: dict[str, Any]) -> dict[str, Any]:
    """What `--method auto` and the page read: for each cell the result of every method, and which one to use."""
    measured = outcomes(found["rows"])
    lines = []
    for ground, width, auc in itertools.product(GROUNDS, WIDTHS, (*AUCS, 1.0)):
        at = {name: measured.get((ground.depth, ground.accuracy, auc, width, name)) for name in SHOWN}
        base = at[CHEAP[0]]
        leads = {name: lead(cell, base) for name in TREES if base is not None and (cell := at[name]) is not None}
        if not leads:
            continue
        methods: dict[str, dict[str, float]] = {}
        for name, cell in at.items():
            if cell is not None:
                methods[name] = {"accuracy": round(cell["right"].count("1") / len(cell["right"]), 6)}
            if name in leads:
                methods[name] |= {"lead": round(leads[name][0], 6), "interval": round(leads[name][1], 6)}
        lines.append(
            {"steps": ground.depth, "accuracy": ground.accuracy, "auc": auc, "width": width, "use": advice(leads),
             "methods": methods}
        )  # fmt: skip
    return {
        **{name: found[name] for name in ("script", "machine", "date", "commit")},
        "keys": {name: METHODS[name] for name in READY}, "cells": lines,
    }  # fmt: skip


def ground_table(cells: list[dict[str, Any]], ground: Ground, width: int) -> list[str]:
    lines = []
    for cell in cells:
        if (cell["steps"], cell["accuracy"], cell["width"]) != (ground.depth, ground.accuracy, width):
            continue
        shown = [f"{cell['auc']:g}" if cell["auc"] < 1 else "exact labels"]
        for name in SHOWN:
            at = cell["methods"].get(name)
            more = f" ({at['lead']:+.3f} ± {at['interval']:.3f})" if at is not None and "lead" in at else ""
            shown.append("" if at is None else f"{at['accuracy']:.3f}{more}")
        trees = [at for name, at in cell["methods"].items() if name in TREES]
        unsure = cell["use"] == CHEAP[0] and any(at["lead"] >= -at["interval"] for at in trees)
        lines.append("| " + " | ".join([*shown, cell["use"] + (" (no tree is ahead)" if unsure else "")]) + " |")
    if not lines:
        return []
    headings = ["AUC", *SHOWN, "use"]
    return [f"### {ground.name}, width {width}", "", "| " + " | ".join(headings) + " |",
            "| " + " | ".join(["---"] * len(headings)) + " |", *lines, ""]  # fmt: skip


def costs_table(cells: dict[tuple[Any, ...], dict[str, Any]], width: int) -> list[str]:
    lines = []
    for ground in GROUNDS:
        base = cells.get((ground.depth, ground.accuracy, 0.8, width, CHEAP[0]))
        for name in (*CHEAP[1:], *DEAR, *LEADS):
            cell = cells.get((ground.depth, ground.accuracy, 0.8, width, name))
            if base is None or cell is None:
                continue
            share = len(cell["right"]) / len(base["right"])
            figures = [cell[kind] / base[kind] / share for kind in ("generated", "kv_tokens")]
            lines.append(f"| {ground.name} | {name} | {figures[0]:.2f} | {figures[1]:.2f} | {_change(cell, base)} |")
    return ["| ground | method | tokens generated | KV | accuracy |", "| --- | --- | --- | --- | --- |", *lines, ""]


def labels_table(cells: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """Exact labels as the process model."""
    lines = []
    for ground in GROUNDS:
        here = (ground.depth, ground.accuracy, 1.0)
        discarded, wide = cells.get((*here, 16, "discard")), cells.get((*here, 64, CHEAP[0]))
        for name in ("discard", *CHEAP, *DEAR):
            cell = cells.get((*here, 16, name))
            if cell is None or discarded is None or wide is None:
                continue
            right, best = (each["right"].count("1") / len(each["right"]) for each in (cell, discarded))
            tokens = cell["generated"] / len(cell["right"]) / (wide["generated"] / len(wide["right"]))
            lines.append(f"| {ground.name} | {name} | {right:.3f} | {right / best:.0%} | {tokens:.2f} |")
        if wide is not None:
            right = wide["right"].count("1") / len(wide["right"])
            lines.append(f"| {ground.name} | {CHEAP[0]}, width 64 | {right:.3f} | | 1.00 |")
    headings = "| ground | method, width 16 | accuracy | of discard's | tokens, best-of-n of width 64 as 1 |"
    return [headings, "| --- | --- | --- | --- | --- |", *lines, ""]


def _change(cell: dict[str, Any], base: dict[str, Any]) -> str:
    mean, half = lead(cell, base)
    return f"{mean:+.3f} ± {half:.3f}"


TOP = """# When a tree beats best-of-n

Tree search pays where a process reward model (PRM) can tell right steps from wrong ones. This page measures how well it
must do so, on a task whose steps and mistakes are known exactly: the policy is a table, the PRM's scores have a given
AUC, and drivers, rules and votes are those of `plaudit search`. All methods search the same questions with the same
draws.

<!-- not run: takes half an hour -->
```bash
python benchmarks/search_when.py --minutes 30 --write
```

{least} to {most} questions a cell, {date}, {machine}.

A tree's accuracy stands with its lead over PRM-weighted best-of-n of the same width and its 95 % interval, question by
question. `use` is the method that leads by more than that interval, of several the one whose interval begins furthest
ahead, or REBASE, where that one is not ahead of it by more than its interval: a [trained process
model](benchmarks/search.md) misled beam and DVTS, and not REBASE. A KV budget is left out, since it has a size of one's
own. Empty cells were not measured. `plaudit search --method auto` reads the same cells, in `plaudit/search/when.json`
([how](search.md#auto)).

## Accuracy
"""
COSTS = """## Cost

At AUC 0.8 and width 16, with best-of-n as 1. `lead` ends a search once the vote can no longer change, `lead 0.95` once
that is all but certain (`budget.lead`).
"""
LABELS = """## Exact labels

With exact labels in place of a PRM. `discard` gives the whole width, evenly, to steps that are still right.
"""
LIMITS = """## What this is not

The policy is simulated: a real one repeats itself, and a real PRM fails on whole kinds of steps rather than by noise.
With [a policy and a PRM that were trained](benchmarks/search.md#with-a-policy-trained-for-it), 17 % right, AUC 0.92,
REBASE and ETS lead at widths 4 and 16 as here and not at 64, and beam and DVTS fall behind as they get wider, perhaps
since what chooses hardest finds the PRM's mistakes first. Measure the AUC of a PRM on steps of your own before you read
a row off; `plaudit train` prints it for process models.
"""


def page(found: dict[str, Any], known: list[dict[str, Any]]) -> str:
    cells = outcomes(found["rows"])
    counts = [len(cell["right"]) for cell in cells.values()]
    lines = [TOP.format(least=min(counts), most=max(counts), machine=found["machine"], date=found["date"])]
    for ground in GROUNDS:
        for width in WIDTHS:
            lines += ground_table(known, ground, width)
    return "\n".join([*lines, COSTS, *costs_table(cells, 16), LABELS, *labels_table(cells), LIMITS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--write", action="store_true", help="Write docs/search-when.md and plaudit/search/when.json.")
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        help='Only this cell: "8 steps, 30%% right, AUC 0.8, width 16".',
    )
    args = parser.parse_args()
    found = measure(args.questions, args.minutes, args.cell)
    known = table(found)
    text = page(found, known["cells"])
    print(text)
    if args.write:
        PAGE.write_text(text)
        with written(TABLE) as file:
            file.write(json.dumps(known, separators=(",", ":")).replace('{"steps"', '\n{"steps"') + "\n")


if __name__ == "__main__":
    main()
