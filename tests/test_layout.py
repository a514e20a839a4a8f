"""Every page that Plaudit generates, on a screen and on a phone, in light and dark mode: no texts overlap, nothing
overflows, and the first screen has the headline and a plot. The pages of a live run and of a server are tested with
their other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from plaudit.plan.show.page import render_page as render_plan
from plaudit.report.history import read_history
from plaudit.report.page import render_page
from plaudit.report.searches.search_page import render_search_page
from plaudit.report.searches.searches import read_searches
from tests.browser import PATIENCE, chromium, faults_in_windows, in_browser
from tests.report.made_up import CRITIC, HEALTHY, write_examples, write_run
from tests.report.test_search_page import write_search

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = ("rl", "sft", "preference", "reward", "prm", "comparison", "kinds", "search", "plan")
FIGURES = {"sft": "accuracy/sums/sampled", "preference": "accuracy", "reward": "pair_accuracy", "prm": "step_auc"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def text_of(name: str, place: Path) -> str:
    if name == "plan":
        return render_plan(ask(PlanOptions("llama-3.1-8b", "1x8xH100")).answer())
    if name == "search":
        return render_search_page(
            read_searches(
                [write_search(place / "ets"), write_search(place / "rebase", method="rebase", width=16, kv_tokens=900)]
            )
        )
    if name in FIGURES:
        runs = [write_examples(place / name, name, 300, FIGURES[name])]
    else:
        runs = [write_run(place / "sums-grpo", {**HEALTHY, **CRITIC}, steps=70)]
    if name == "comparison":
        runs.append(write_run(place / "sums-ppo", {**HEALTHY, **CRITIC}, steps=90, seed=1, algorithm="ppo"))
    if name == "kinds":
        runs.append(write_examples(place / "sums-sft", "sft", 300, FIGURES["sft"]))
    return render_page([read_history(run) for run in runs])


@in_browser
@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_layout_faults(name: str, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(text_of(name, tmp_path), encoding="utf-8")
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(file.as_uri())
    assert faults_in_windows(page) == {}
    page.close()
