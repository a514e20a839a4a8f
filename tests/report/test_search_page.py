"""The page of searches, made from the event log only, in a real browser."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plaudit.errors import RunError
from plaudit.events import EventLog
from plaudit.report.searches.search_page import MOST_NODES, render_search_page
from plaudit.report.searches.searches import is_search, read_searches
from plaudit.report.terminal import print_searches
from plaudit.search.summary import summary_text
from tests.browser import chromium, expect, in_browser
from tests.report.made_up import HOSTILE, write_run

FIGURES = {
    "method": "ets", "width": 4, "questions": 2, "answered": 2, "failed": 0, "accuracy": 0.5, "accuracy_se": 0.35,
    "kv_tokens": 400, "kv_peak": 90, "generated_tokens": 300, "calls": 40, "seconds": 3.0, "solver_seconds": 0.1,
    "cluster_seconds": 0.1, "unsolved": 0, "phases": {"generate": 2.0}, "stopped": {"done": 2},
}  # fmt: skip


def node(id: int, parent: int, text: str, state: str, score: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "parent": parent,
        "text": text,
        "tokens": 3,
        "state": state,
        "score": score,
        "value": score,
    } | more


def write_search(directory: Path, nodes: list[dict[str, Any]] | None = None, **figures: Any) -> Path:
    directory.mkdir(parents=True)
    tree = nodes or [
        node(0, -1, "", "expanded", 1.0), node(1, 0, "7+8=15;", "expanded", 0.9), node(2, 0, HOSTILE, "pruned", 0.2),
        node(3, 0, "7+8=15;", "expanded", 0.9, twin=1), node(4, 1, "#15", "finished", 0.8),
        node(5, 1, "", "failed", None, error="empty step"),
    ]  # fmt: skip
    log = EventLog(directory)
    for index in (0, 1):
        log.write(
            "sample", step=index, index=index, prompt=f"7+8= {HOSTILE}", truth="15", answer="15", right=True,
            stopped="done", costs={"kv": [4, 11, 14]}, nodes=tree,
        )  # fmt: skip
    log.note("search", **{**FIGURES, **figures})
    log.close()
    return directory


def data_of(page: str) -> dict[str, Any]:
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(embedded)
    return data


def test_searches_are_distinguished_from_training_runs(tmp_path: Path) -> None:
    search, training = write_search(tmp_path / "a"), write_run(tmp_path / "b")
    assert is_search(search)
    assert not is_search(training)
    with pytest.raises(RunError, match="b is not a search"):
        read_searches([search, training])


def test_the_page_limits_the_number_of_tree_nodes(tmp_path: Path) -> None:
    many = [node(0, -1, "", "expanded", 1.0), *(node(i, 0, "1+1=2;", "pruned") for i in range(1, MOST_NODES))]
    (run,) = data_of(render_search_page(read_searches([write_search(tmp_path / "a", many)])))["runs"]
    assert len(run["trees"]) == 1


def test_confidence_intervals_match_in_terminal_and_page(tmp_path: Path) -> None:
    searches = read_searches([write_search(tmp_path / "a")])  # standard error 0.35
    out = io.StringIO()
    print_searches(searches, Console(file=out, width=160))
    assert "right (± 95 %)" in out.getvalue()
    assert "0.500 ± 0.686" in out.getvalue()
    assert "0.500 ± 0.686 (95 %)" in summary_text({**FIGURES, "programme_share": 0})
    (run,) = data_of(render_search_page(searches))["runs"]
    assert run["margin"] == 0.686
    (unjudged,) = read_searches([write_search(tmp_path / "b")])
    figures = {name: value for name, value in unjudged.figures.items() if not name.startswith("accuracy")}
    assert replace(unjudged, figures=figures).margin is None


@pytest.mark.slow
@in_browser
def test_the_page_draws_trees_and_budgets(tmp_path: Path) -> None:
    runs = [write_search(tmp_path / "a"), write_search(tmp_path / "b", method="rebase", width=16, kv_tokens=900)]
    file = tmp_path / "page.html"
    file.write_text(render_search_page(read_searches(runs)))
    complaints: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if "file:" not in request.url else None)
        page.goto(file.as_uri())
        expect(page.locator("#figures tbody tr")).to_have_count(2)
        expect(page.locator("#figures")).to_contain_text("right (± 95 %)")
        expect(page.locator("#figures tbody tr").first).to_contain_text("0.500 ± 0.686")
        expect(page.locator("#scatter circle")).to_have_count(2)
        expect(page.locator("#tree .node")).to_have_count(5)  # a duplicate node is drawn with its original
        page.locator("#tree rect.node").hover()
        expect(page.locator("#said")).to_contain_text("7+8=15;#15")
        expect(page.locator("#kv rect")).to_have_count(3)
        page.select_option("#axis", "calls")
        page.select_option("#run", "1")
        page.select_option("#question", "1")
        expect(page.locator("#answer")).to_contain_text("answer 15 right")
    assert not [text for text in complaints if not text.startswith("data:")]
