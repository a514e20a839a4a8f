"""Writes docs/reference/metrics.md: every metric of a training run and of the server, from the code that defines them.

python docs/metrics.py          write the page
python docs/metrics.py --check  exit 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from plaudit.metrics import SECTIONS, Metric
from plaudit.serve.metrics import CriticGauges, Metrics

PAGE = Path(__file__).parent / "reference" / "metrics.md"
HEAD = """# Metrics

Made by `python docs/metrics.py` from `plaudit/metrics.py` and `plaudit/serve/metrics.py`. Metrics of runs are in
`events.jsonl`, in the report, its CSV and what `--track` sends ([report.md](../report.md)), and
`run.curve("reward/mean")` gives one in Python. A run writes those that apply to it. A name in capitals stands for one
of yours.
"""
SERVER = """## The server

`/metrics` of `plaudit serve` and `plaudit critic`, for Prometheus ([serving.md](../serving.md#logs-and-metrics)). A
histogram has `_bucket`, `_sum` and `_count`. `process_…` and `python_info` are those of every Python program.
"""
UNITS = {"seconds": "s", "tokens": "tokens", "bytes": "bytes", "info": "1", "ready": "0 or 1", "sum": "score",
         "loss": "loss"}  # fmt: skip


def page() -> str:
    return "\n".join([HEAD, *(_section(title, table) for title, table in SECTIONS.items()), SERVER, *_server()])


def _section(title: str, table: dict[str, Metric]) -> str:
    rows = "\n".join(f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in table.items())
    return f"## {title}\n\n| metric | unit | what it says |\n| --- | --- | --- |\n{rows}\n"


def _server() -> Iterator[str]:
    metrics = Metrics()
    CriticGauges(metrics.registry)
    yield "| metric | type | labels | unit | what it says |\n| --- | --- | --- | --- | --- |"
    labels = {name: each._labelnames for name, each in metrics.registry._names_to_collectors.items() if _labelled(each)}
    families = [family for family in metrics.registry.collect() if family.name.startswith("plaudit_")]
    for family in sorted(families, key=lambda family: family.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        said = family.documentation.rstrip(".").replace("|", "\\|")
        of = ", ".join(f"`{label}`" for label in labels.get(name, ()))
        yield f"| `{name}` | {family.type} | {of} | {_unit(family.name)} | {said} |"
    yield ""


def _labelled(collector: object) -> bool:
    return hasattr(collector, "_labelnames")


def _unit(name: str) -> str:
    return UNITS.get(name.rsplit("_", 1)[-1], "count")


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        sys.exit(0 if same else "docs/reference/metrics.md is out of date: run python docs/metrics.py")
    PAGE.write_text(text, encoding="utf-8")
