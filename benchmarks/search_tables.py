"""Writes the tables of docs/benchmarks/search.md from the files in benchmarks/results.

    python benchmarks/search_tables.py [--write]

Prints them; with --write they replace the tables in the page that have the same first row. The text around them is
written by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "search.md"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)) + "\n"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def accuracy() -> str:
    heads = (
        "width", "questions", "method", "accuracy", "to REBASE", "KV tokens", "KV less, times", "generated", "calls",
    )  # fmt: skip
    rows = [
        (
            str(x["width"]), f"{x['questions']:,}", x["method"], f"{x['accuracy']:.3f} ± {x['interval']:.3f}",
            f"{x['to_rebase']:+.3f} ± {x['to_rebase_se']:.3f}", f"{x['kv_tokens']:,.0f}", f"{x['kv_reduction']:.2f}",
            f"{x['generated']:,.0f}", f"{x['calls']:,.0f}",
        )
        for x in sorted(read("search-main.json")["lines"], key=lambda x: int(x["width"]))
    ]  # fmt: skip
    return table(heads, rows)


def throughput(found: dict[str, Any]) -> str:
    names = {
        "loop": "a plain loop over transformers: `generate` the children of a level, score every whole path",
        "plaudit": "`plaudit search`",
    }
    rows = []
    for key, name in names.items():
        runs = sorted(found["runs"][key], key=lambda run: float(run["seconds"]))
        median = runs[len(runs) // 2]
        speed = median["tokens"] / median["seconds"]
        rows.append((name, f"{found['seconds_per_question'][key]:.2f}", f"{speed:,.0f}"))
    return table(("search by", "seconds a question", "tokens/s"), rows)


def programmes() -> str:
    heads = ("width", "leaves", "programme", "HiGHS alone", "clustering", "generation and scoring")
    rows = [
        (
            str(x["width"]), f"{x['leaves']:.0f}", f"{x['programme_ms']:.1f} ({x['programme_ms_worst']:.0f})",
            f"{x['highs_ms']:.1f} ({x['highs_ms_worst']:.0f})", f"{x['cluster_ms']:.2g}",
            f"{x['model_ms_per_level']:.2g}" if x["model_ms_per_level"] < 100 else f"{x['model_ms_per_level']:.0f}",
        )
        for x in read("search-time.json")["lines"]
    ]  # fmt: skip
    return table(heads, rows)


def lanes() -> str:
    found = read("search-lanes.json")["lines"]
    counts = list(found[0]["seconds"])
    heads = ("method", "spread", *(f"lanes = {count}" for count in counts), "every path alone")
    rows = [
        (x["method"], f"{x['spread']:g}", *(f"{x['seconds'][c]:.1f}" for c in counts), f"{x['bound']:.1f}")
        for x in found
    ]  # fmt: skip
    return table(heads, rows)


def pool() -> str:
    """Best-first over a persistent pool, by the cost of a return, compared with REBASE that generates as much."""
    heads = ("ground", "AUC", "width", "a return costs", "best-first", "REBASE of that width",
             "lead at the same tokens", "tokens, REBASE as 1", "KV, REBASE as 1", "rounds with a return")  # fmt: skip
    rows = []
    for x in read("search-pool.json")["rows"]:
        ours, theirs = x["best_first"], x["rebase"]
        rows.append(
            (f"{x['depth']} steps, {x['accuracy']:.0%} right", f"{x['auc']:g}" if x["auc"] < 1 else "exact labels",
             str(x["width"]), f"{x['return_cost']:g}", f"{ours['right']:.3f}",
             f"{theirs['right']:.3f}", f"{x['lead']:+.3f} ± {x['interval']:.3f} (width {x['rebase_width']})",
             f"{ours['generated'] / theirs['generated']:.2f}", f"{ours['kv_tokens'] / theirs['kv_tokens']:.2f}",
             f"{ours['returns'] / ours['rounds']:.0%}")
        )  # fmt: skip
    return table(heads, rows)


def budgets() -> str:
    """Accuracy by the set of limits of a search and their size."""
    found = read("search-budgets.json")
    shares = sorted({x["share"] for cell in found["cells"] for x in cell["lines"]} - {None})
    heads = ("width", "method", "limits", "lead", *(f"{share:g} times the mean" for share in shares),
             "tokens at 1", "KV at 1", "model seconds at 1")  # fmt: skip
    short, rows = {"generated": "tokens", "kv_tokens": "KV", "seconds": "seconds"}, []
    for cell in sorted(found["cells"], key=lambda cell: int(cell["width"])):
        by = {(x["share"], tuple(x["limits"]), x["lead"]): x for x in cell["lines"]}
        for limits, lead in dict.fromkeys((tuple(x["limits"]), x["lead"]) for x in cell["lines"]):
            if lead and 0 < len(limits) < 3:
                continue  # same result as with all three
            line = by.get((1.0, limits, lead)) or by[None, limits, lead]
            at = [by.get((share, limits, lead)) or by.get((None, limits, lead)) for share in shares]
            own = at if limits else at[:1]
            shown = ["" if x is None else f"{x['accuracy']:.3f} ± {x['interval']:.3f}" for x in own]
            rows.append(
                (str(cell["width"]), cell["method"], ", ".join(short[name] for name in limits) or "none",
                 {False: "", True: "certain", 0.95: "0.95"}[lead], *shown, *[""] * (len(shares) - len(shown)),
                 f"{line['generated']:,.0f}", f"{line['kv_tokens']:,.0f}", f"{line['seconds']:.3f}")
            )  # fmt: skip
    return table(heads, rows)


def policy_trees() -> str:
    """Trees with the process model trained on exact labels, compared with best-of-n with the same model."""
    heads = (
        "ground", "width", "method", "questions", "accuracy", "best-of-n of that width", "lead at the same tokens",
        "lead at the same seconds", "tokens", "KV tokens", "PRM tokens", "ms a question",
    )  # fmt: skip
    rows = []
    for ground, found in read("search_policy_gpu.json")["grounds"].items():
        rows += [
            (ground, str(x["width"]), x["method"], f"{x['questions']:,}", f"{x['accuracy']:.3f} ± {x['interval']:.3f}",
             f"{x['same_width']['best_of_n']:.3f}", _lead(x["same_tokens"]), _lead(x.get("same_seconds")),
             *(f"{x[name]:,.0f}" for name in ("generated", "kv_tokens", "prm_tokens")),
             f"{1e3 * x['seconds']:.1f}" if "seconds" in x else "")
            for x in found["cells"] if x["prm"] == "steps"
        ]  # fmt: skip
    return table(heads, rows)


def _lead(at: dict[str, Any] | None) -> str:
    if at is None:
        return ""
    capped = f", of {at['of_pool']}" if at["of_pool"] < at["n"] else ""
    return f"{at['lead']:+.3f} ± {at['interval']:.3f} (n = {at['n']}{capped})"


def policy_pools() -> str:
    """Best-of-n from the pool, by the model that weights the votes."""
    heads = ("ground", "n", "majority", "by the PRM of labels", "by the PRM of values", "by exact labels", "tokens")
    rows = []
    for ground, found in read("search_policy_gpu.json")["grounds"].items():
        for n in dict.fromkeys(x["n"] for x in found["best_of_n"]):
            by = {x["prm"]: x for x in found["best_of_n"] if x["n"] == n}
            shown = [f"{by[prm]['accuracy']:.3f}" if prm in by else "" for prm in (None, "steps", "values", "labels")]
            rows.append((ground, str(n), *shown, f"{by[None]['generated']:,.0f}"))
    return table(heads, rows)


def policy_judges() -> str:
    """Trees of one width, by the model that scores the steps."""
    heads = ("ground", "width", "steps scored by", "questions", "beam", "dvts", "rebase", "ets")
    rows = []
    for ground, found in read("search_policy_gpu.json")["grounds"].items():
        cells = {(x["prm"], x["width"], x["method"]): x for x in found["cells"]}
        names = {"steps": "the PRM of labels", "values": "the PRM of values", "labels": "exact labels"}
        for (prm, name), width in itertools.product(names.items(), (4, 16, 64)):
            own = [cells.get((prm, width, method)) for method in heads[4:]]
            if any(own):
                count = min(x["questions"] for x in own if x)
                shown = [f"{x['accuracy']:.3f} ± {x['interval']:.3f}" if x else "" for x in own]
                rows.append((ground, str(width), name, f"{count:,}", *shown))
    return table(heads, rows)


def policy_times() -> str:
    heads = ("ground", "width", "method", "lanes", "tokens/s", "of plain generation's", "generating", "scoring",
             "programmes and clusters")  # fmt: skip
    rows = []
    for ground, found in read("search_policy_gpu.json")["grounds"].items():
        timed = found["timed"]
        rows.append((ground, "64", "plain generation", "", f"{timed['plain_tokens_per_second']:,.0f}", "", "", "", ""))
        rows += [
            (ground, str(x["width"]), x["method"], str(x["lanes"]), f"{x['tokens_per_second']:,.0f}",
             f"{x['share']:.0%}", f"{x['generate'] / x['all']:.0%}", f"{x['score'] / x['all']:.0%}",
             f"{x['programme_share']:.1%}")
            for x in timed["trees"]
        ]  # fmt: skip
    return table(heads, rows)


def put(page: str, new: str) -> str:
    """Replaces the table with the same first row in the page."""
    lines, head = page.splitlines(keepends=True), new.splitlines(keepends=True)[0]
    if head not in lines:
        raise SystemExit(
            f"{PAGE.name} has no table with the first row {head.strip()}: put that row in where it belongs"
        )
    begin = end = lines.index(head)
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "".join([*lines[:begin], new, *lines[end:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    tables = [
        accuracy(), pool(), budgets(), throughput(read("search_throughput.json")), programmes(), lanes(),
        policy_trees(), policy_pools(), policy_judges(), policy_times(),
    ]  # fmt: skip
    if args.write:
        page = PAGE.read_text()
        for each in tables:
            page = put(page, each)
        PAGE.write_text(page)
    else:
        print("\n".join(tables))


if __name__ == "__main__":
    main()
