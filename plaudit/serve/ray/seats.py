"""The replicas that Ray Serve has of each application, as this process last heard."""

from __future__ import annotations

_SEATS: dict[str, frozenset[str]] = {}


def tell(application: str, seats: frozenset[str]) -> None:
    _SEATS[application] = seats


def seats(application: str) -> frozenset[str]:
    return _SEATS.get(application, frozenset())
