"""Results from the rows of benchmarks/search_policy_gpu.py: best-of-n from a pool, compared with trees."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

SUBSETS = 16  # draws from the pool, whose mean is the accuracy of best-of-n
COSTS = ("generated", "kv_tokens", "kv_peak", "prm_tokens", "calls", "solver", "clustering")
Row = dict[str, Any]


def best_of(row: Row, n: int, prm: str | None) -> float:
    """The probability that n responses of a pool vote for a right answer: by count, or weighted by a process model."""
    size = len(row["answers"])
    n = min(n, size)
    rng = random.Random(f"{row['question']} {n}")
    draws = 1 if n == size else SUBSETS
    weights = row["weights"][prm] if prm is not None else [1.0] * size
    right = 0
    for _ in range(draws):
        votes: dict[str, float] = {}
        chosen = rng.sample(range(size), n)
        for i in chosen:
            if row["answers"][i]:
                votes[row["answers"][i]] = votes.get(row["answers"][i], 0.0) + weights[i]
        if votes:
            first = max(votes, key=votes.__getitem__)
            own = [i for i in chosen if row["answers"][i] == first]
            right += row["right"][max(own, key=lambda i: weights[i])]
    return right / draws


def pool_auc(rows: Sequence[Row], prm: str) -> float | None:
    """The probability that a right response scores higher than a wrong one to the same question, as `--method auto`
    measures it."""
    chances = []
    for row in rows:
        weights, right = np.array(row["weights"][prm]), np.array(row["right"])
        if right.any() and not right.all():
            lead = weights[right][:, None] - weights[~right][None]
            chances.append(float(np.mean((lead > 0) + 0.5 * (lead == 0))))
    return float(np.mean(chances)) if chances else None


def kept_rows(path: Path) -> list[Row]:
    """Rows measured earlier. An incomplete last line is measured again."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """A mean and its 95 % interval."""
    return fmean(values), 1.96 * (stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0)


def tables(rows: Sequence[dict[str, Any]], figures: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    pools = {row["question"]: row for row in rows if row["method"] == "pool"}
    if not pools:
        return {"cells": []}
    each_tokens = fmean(fmean(row["tokens"]) for row in pools.values())
    each_prm = fmean(row["prm_tokens"] for row in pools.values())
    kinds = [*facts["prm"], "labels"]
    size = len(next(iter(pools.values()))["answers"])
    curve = []
    for n in (1, 4, 16, 64, size):
        if n > size:
            continue
        for prm in (None, *kinds):
            accuracy, interval = mean_of([best_of(row, n, prm) for row in pools.values()])
            kv = [row["kv"][str(n)] if str(n) in row["kv"] else row["kv"].get(n) for row in pools.values()]
            curve.append(
                {"n": n, "prm": prm, "questions": len(pools), "accuracy": accuracy, "interval": interval,
                 "generated": n * each_tokens, "prm_tokens": 0 if not prm else n * each_prm if n == size else None,
                 "kv_tokens": None if None in kv else fmean(kv),
                 "seconds": n * figures["seconds_per_path"] if figures else None}
            )  # fmt: skip
    passed = fmean(any(row["right"]) for row in pools.values())
    by: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["method"] != "pool" and row["question"] in pools:
            by.setdefault((row["prm"], row["method"], row["width"]), {})[row["question"]] = row
    order = sorted(by, key=lambda name: (name[0], name[2], name[1]))
    lines = [cell(*name, by[name], pools, each_tokens, figures) for name in order]
    return {
        "pool": {"size": size, "questions": len(pools), "tokens_per_path": each_tokens, "some_right": passed,
                 "auc": {prm: pool_auc(list(pools.values()), prm) for prm in kinds}},
        "best_of_n": curve, "cells": lines,
    }  # fmt: skip


def cell(
    prm: str, method: str, width: int, own: dict[int, dict[str, Any]], pools: dict[int, Any], each_tokens: float,
    figures: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A tree compared with best-of-n: of the same width, the same tokens, the same seconds."""
    indices = sorted(own)
    right = [float(own[q]["right"]) for q in indices]
    accuracy, interval = mean_of(right)
    line: dict[str, Any] = {
        "prm": prm, "method": method, "width": width, "questions": len(indices), "accuracy": accuracy,
        "interval": interval, **{name: fmean(own[q][name] for q in indices) for name in COSTS},
    }  # fmt: skip
    clocks = [x for x in figures.get("trees", []) if (x["method"], x["width"], x["lanes"]) == (method, width, 1)]
    seconds = clocks[0]["seconds_per_question"] if clocks and prm != "labels" else None
    sizes = {"same_width": width, "same_tokens": round(line["generated"] / each_tokens)}
    if seconds is not None:
        line["seconds"] = seconds
        sizes["same_seconds"] = max(1, round(seconds / figures["seconds_per_path"]))
    for name, n in sizes.items():
        size = len(next(iter(pools.values()))["answers"])
        base = [best_of(pools[q], n, prm) for q in indices]
        lead, half = mean_of([a - b for a, b in zip(right, base, strict=True)])
        line[name] = {"n": n, "of_pool": min(n, size), "best_of_n": fmean(base), "lead": lead, "interval": half}
    line["right"] = "".join(str(int(each)) for each in right)
    return line


def show(result: dict[str, Any]) -> None:
    console = Console(width=200)
    found = result.get("pool", {})
    console.print(f"{result['ground']}, level {result['level']}: {found}")
    table = Table(title="best-of-n from the pool")
    for name in ("n", "vote by", "questions", "accuracy", "tokens", "KV", "PRM tokens", "seconds"):
        table.add_column(name, justify="right")
    for x in result.get("best_of_n", []):
        cost = [x["generated"], x["kv_tokens"], x["prm_tokens"]]
        table.add_row(
            str(x["n"]), x["prm"] or "majority", str(x["questions"]), f"{x['accuracy']:.3f} ± {x['interval']:.3f}",
            *("" if value is None else f"{value:,.0f}" for value in cost),
            "" if x["seconds"] is None else f"{x['seconds']:.4f}",
        )  # fmt: skip
    console.print(table)
    table = Table(title="trees; leads over best-of-n with the same process model")
    names = ("PRM", "method", "width", "questions", "accuracy", "tokens", "KV", "PRM tokens", "seconds", "same width",
             "same tokens", "same seconds")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for x in result["cells"]:
        leads = [
            f"{x[name]['lead']:+.3f} ± {x[name]['interval']:.3f} (n {x[name]['n']})" if name in x else ""
            for name in ("same_width", "same_tokens", "same_seconds")
        ]
        table.add_row(
            x["prm"], x["method"], str(x["width"]), str(x["questions"]), f"{x['accuracy']:.3f} ± {x['interval']:.3f}",
            *(f"{x[name]:,.0f}" for name in ("generated", "kv_tokens", "prm_tokens")),
            f"{x['seconds']:.4f}" if "seconds" in x else "", *leads,
        )  # fmt: skip
    console.print(table)
