"""The tables of docs/benchmarks/search.md, made of the files in benchmarks/results.

    python benchmarks/search_tables.py [--write]

Prints them; with --write they take the place of those in the page that have the same first row. What the page says
about them is for a person to write.
"""

from __future__ import annotations

import argparse
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


def put(page: str, new: str) -> str:
    """The page with this table in place of the one that has its first row."""
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
    tables = [accuracy(), throughput(read("search_throughput.json")), programmes(), lanes()]
    if args.write:
        page = PAGE.read_text()
        for each in tables:
            page = put(page, each)
        PAGE.write_text(page)
    else:
        print("\n".join(tables))


if __name__ == "__main__":
    main()
