"""Selects which cases run when. Some tests run a share of their cases, a different one every day; PLAUDIT_SOAK runs all
(`make soak`).

PLAUDIT_DAY, a number, selects the share: with the value of a failed run, the same cases run again.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from typing import Any

import pytest

SOAK = bool(os.environ.get("PLAUDIT_SOAK"))
DAY = int(os.environ.get("PLAUDIT_DAY") or datetime.datetime.now(datetime.UTC).toordinal())
SHARES = int(os.environ.get("PLAUDIT_SHARES") or 1)  # of the slow tests: `make slow` runs all, .ci/run a share


def in_turn(number: int, shares: int) -> bool:
    """Whether case `number` is in today's share, out of this many shares."""
    return SOAK or number % shares == DAY % shares


def mostly_slow(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Cases for `parametrize`: the first ones are fast tests, the others slow ones."""
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if number < fast else pytest.mark.slow) for number, case in enumerate(each)]
