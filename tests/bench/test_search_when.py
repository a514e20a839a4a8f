"""The page on when tree search wins matches the output of its script; lead and advice are checked by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import search_when  # noqa: E402


def test_page_and_table_match_the_results() -> None:
    results = json.loads(search_when.RESULTS.read_text())
    fix = "run: python benchmarks/search_when.py --minutes 0 --write"
    table = search_when.table(results)
    assert json.loads(search_when.TABLE.read_text()) == json.loads(json.dumps(table)), fix
    assert search_when.page(results, table["cells"]) == search_when.PAGE.read_text(), fix


def test_lead_and_its_confidence_interval_by_hand() -> None:
    """+1, 0, 0, -1, +1, 0, 0, +1: mean 0.25, squares around it 3.5, so 1.96 · sqrt(3.5 / 7 / 8)."""
    mean, half = search_when.lead({"right": "10101001"}, {"right": "00110000"})
    assert mean == pytest.approx(0.25)
    assert half == pytest.approx(1.96 * (3.5 / 7 / 8) ** 0.5)


@pytest.mark.parametrize(
    ("leads", "method"),
    [
        ({"beam": (0.2, 0.1), "rebase": (0.3, 0.1)}, "rebase"),
        ({"beam": (0.2, 0.05), "dvts": (0.3, 0.2)}, "beam"),  # lower bound 0.15; the other has 0.1
        ({"beam": (0.3, 0.05), "rebase": (0.26, 0.05)}, "rebase"),  # it may be equally far ahead
        ({"beam": (0.3, 0.05), "rebase": (0.24, 0.05)}, "beam"),
        ({"beam": (0.2, 0.3), "rebase": (-0.3, 0.1)}, "best-of-n"),
        ({"beam": (-0.2, 0.1), "rebase": (-0.3, 0.1)}, "best-of-n"),
    ],
)
def test_advised_method_for_given_leads(leads: dict[str, tuple[float, float]], method: str) -> None:
    assert search_when.advice(leads) == method
