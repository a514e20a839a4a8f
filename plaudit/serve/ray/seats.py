"""The replicas of each Ray Serve application, as last reported to this process."""

from __future__ import annotations

_SEATS: dict[str, frozenset[str]] = {}


def tell(application: str, seats: frozenset[str]) -> None:
    _SEATS[application] = seats


def seats(application: str) -> frozenset[str]:
    return _SEATS.get(application, frozenset())
