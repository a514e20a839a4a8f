"""Benefit of returning to earlier nodes: best-first over a persistent pool against REBASE, at equal tokens.

    python benchmarks/search_pool.py [--questions 200] [--minutes 10]

The task is that of `search_world.py`, whose policy is a table and whose process model has a given AUC. For each ground,
AUC, width and cost of a return: the accuracy of best-first, its tokens and KV, compared with REBASE of the same width
and of a width enlarged by the factor by which best-first generates more, question by question. Written to
benchmarks/results/search-pool.json; `search_tables.py --write` puts it into docs/benchmarks/search.md. One process, one
thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

from search_world import READING, Ground, World, search
from stamp import commit, processor

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.output import written
from plaudit.search.questions.answers import winner
from plaudit.search.tree.tree import Node

RESULTS = Path(__file__).parent / "results" / "search-pool.json"
GROUNDS = (Ground(8, 0.30), Ground(24, 0.05))
AUCS = (0.8, 0.9, 0.97, 1.0)
COSTS = (0.1, 0.2, 0.3)
WIDTHS = (4, 16)


def measured(ground: Ground, auc: float, questions: int, **keys: Any) -> dict[str, Any]:
    """Which questions were right, the cost, and the number of rounds that continued a node behind the deepest leaf."""
    # Deep enough that paths end by themselves; the pool's own bound is the number of steps of a 60-level search.
    table = SearchRuleTable(max_depth=60, **keys)
    right, generated, kv, rounds, returns = "", 0, 0, 0, 0
    for question in range(questions):
        driver = search(World(ground, auc, question), table, BudgetTable())
        best = winner(driver.answers(), "weighted", READING.alike)
        right += str(int(best is not None and best.text == "0"))
        generated += driver.costs.generated
        kv += driver.costs.kv_tokens
        rounds += driver.costs.rounds
        returns += _returns(driver.tree.nodes)
    return {"right": right, "generated": generated, "kv_tokens": kv, "rounds": rounds, "returns": returns}


def _returns(nodes: list[Node]) -> int:
    """Rounds that did not exceed the depth of an earlier round."""
    deepest, returned = {0: 0}, set()  # by round, over all rounds up to it
    for node in nodes[1:]:  # in round order
        if node.depth <= deepest[node.round - 1]:
            returned.add(node.round)
        deepest[node.round] = max(node.depth, deepest[node.round - 1], deepest.get(node.round, 0))
    return len(returned)


def lead(ours: str, theirs: str) -> tuple[float, float]:
    """Mean difference of pairs, with half of the 95 % interval."""
    pairs = [int(a) - int(b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(pairs) / len(pairs)
    spread = math.sqrt(sum((each - mean) ** 2 for each in pairs) / (len(pairs) - 1) / len(pairs))
    return mean, 1.96 * spread


def rows(questions: int, minutes: float) -> list[dict[str, Any]]:
    end = time.monotonic() + 60 * minutes
    lines: list[dict[str, Any]] = []
    for width, ground, auc in itertools.product(WIDTHS, GROUNDS, AUCS):
        if time.monotonic() > end:
            break
        plain = measured(ground, auc, questions, method="rebase", width=width)
        known = {width: plain}
        for cost in COSTS:
            ours = measured(ground, auc, questions, method="best-first", return_cost=cost, width=width)
            same = max(width, math.ceil(round(width * ours["generated"] / plain["generated"], 1)))
            if same not in known:
                known[same] = measured(ground, auc, questions, method="rebase", width=same)
            mean, half = lead(ours["right"], known[same]["right"])
            lines.append(
                {"depth": ground.depth, "accuracy": ground.accuracy, "auc": auc, "width": width, "return_cost": cost,
                 "best_first": _figures(ours), "rebase": _figures(plain), "rebase_width": same,
                 "rebase_wide": _figures(known[same]), "lead": mean, "interval": half}
            )  # fmt: skip
            print(width, ground.name, auc, cost, lines[-1]["best_first"], same, f"{mean:+.3f} ± {half:.3f}", flush=True)
    return lines


def _figures(found: dict[str, Any]) -> dict[str, float]:
    count = len(found["right"])
    sums = {name: found[name] / count for name in ("generated", "kv_tokens", "rounds", "returns")}
    return {"right": found["right"].count("1") / count, **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    began = time.process_time()
    lines = rows(args.questions, args.minutes)
    found = {
        "script": "benchmarks/search_pool.py", "machine": processor(), "date": time.strftime("%Y-%m-%d"),
        "commit": commit(), "questions": args.questions,
        "cpu_seconds": round(time.process_time() - began, 1), "rows": lines,
    }  # fmt: skip
    with written(RESULTS) as file:
        file.write(json.dumps(found, separators=(",", ":")).replace('{"depth"', '\n{"depth"') + "\n")


if __name__ == "__main__":
    main()
