"""The point at which limits end a search, derived from an unlimited search, matches a real search with those limits."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import search_budgets


def test_derived_end_matches_a_real_search_under_the_limits() -> None:
    for method in search_budgets.METHODS:
        path = search_budgets.points(method, 4, 1)
        middle = path[len(path) // 2]
        limits = {name: float(getattr(middle, name)) for name in search_budgets.LIMITS}
        assert search_budgets.ended(path, {"generated": limits["generated"]}, False) is middle
        assert search_budgets.ended(path, {}, False) is path[-1]
        search_budgets.check(method, 4, 1, path, limits)


def test_model_time_by_hand() -> None:
    """At the start of the third round: two rounds of five steps are done, and the first started at 0."""
    costs = search_budgets.Costs(rounds=3, calls=10)
    assert search_budgets.model_time(costs) == 2 * search_budgets.ROUND + 10 * search_budgets.STEP
