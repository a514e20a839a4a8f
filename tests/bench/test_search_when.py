"""The page on when a tree wins matches what its script writes from the results; its figures by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import search_when  # noqa: E402


def test_page_and_table_are_made_of_the_results() -> None:
    found = json.loads(search_when.RESULTS.read_text())
    cure = "run: python benchmarks/search_when.py --minutes 0 --write"
    table = search_when.table(found)
    assert json.loads(search_when.TABLE.read_text()) == json.loads(json.dumps(table)), cure
    assert search_when.page(found, table["cells"]) == search_when.PAGE.read_text(), cure


def test_a_lead_and_its_interval_by_hand() -> None:
    """+1, 0, 0, -1, +1, 0, 0, +1: mean 0.25, squares around it 3.5, so 1.96 · sqrt(3.5 / 7 / 8)."""
    mean, half = search_when.lead({"right": "10101001"}, {"right": "00110000"})
    assert mean == pytest.approx(0.25)
    assert half == pytest.approx(1.96 * (3.5 / 7 / 8) ** 0.5)


@pytest.mark.parametrize(
    ("leads", "method"),
    [
        ({"beam": (0.2, 0.1), "rebase": (0.3, 0.1)}, "rebase"),
        ({"beam": (0.2, 0.05), "dvts": (0.3, 0.2)}, "beam"),  # 0.15 for certain, where the other has 0.1
        ({"beam": (0.3, 0.05), "rebase": (0.26, 0.05)}, "rebase"),  # which may be as far ahead
        ({"beam": (0.3, 0.05), "rebase": (0.24, 0.05)}, "beam"),
        ({"beam": (0.2, 0.3), "rebase": (-0.3, 0.1)}, "best-of-n"),
        ({"beam": (-0.2, 0.1), "rebase": (-0.3, 0.1)}, "best-of-n"),
    ],
)
def test_what_is_advised(leads: dict[str, tuple[float, float]], method: str) -> None:
    assert search_when.advice(leads) == method
