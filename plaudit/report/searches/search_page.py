"""An HTML page about searches: accuracy against budget, side by side, and the growth of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.report.page import filled
from plaudit.report.searches.searches import Searched

MOST_NODES = 20_000  # nodes of all trees on one page
_TEMPLATE = Path(__file__).with_name("search_page.html")
_FIGURES = (
    "method", "width", "questions", "answered", "failed", "accuracy", "kv_tokens", "kv_peak",
    "generated_tokens", "calls", "seconds", "solver_seconds", "cluster_seconds", "unsolved", "phases", "stopped",
)  # fmt: skip
_NODE = ("id", "parent", "text", "tokens", "state", "score", "value", "cluster", "error", "twin")


def render_search_page(runs: Sequence[Searched]) -> str:
    share = MOST_NODES // max(1, len(runs))
    return filled(_TEMPLATE.read_text(encoding="utf-8"), {"runs": [_run(run, share) for run in runs]})


def _run(run: Searched, nodes_left: int) -> dict[str, Any]:
    trees: list[dict[str, Any]] = []
    for tree in sorted(run.trees, key=lambda tree: int(tree["index"])):
        nodes_left -= len(tree["nodes"])
        if trees and nodes_left < 0:
            break
        trees.append(_tree(tree))
    figures = {name: run.figures[name] for name in _FIGURES if name in run.figures}
    return {"name": run.name, "label": run.label, "margin": run.margin, "figures": figures, "trees": trees}


def _tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: tree.get(name) for name in ("index", "prompt", "truth", "answer", "right", "stopped")}
    nodes = [{name: node[name] for name in _NODE if node.get(name) is not None} for node in tree["nodes"]]
    return {**shown, "kv": tree["costs"]["kv"], "nodes": nodes}
