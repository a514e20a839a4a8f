"""The replicas of each Ray Serve application, as last reported to this process."""

from __future__ import annotations

_REPLICA_IDS: dict[str, frozenset[str]] = {}


def update(application: str, replica_ids: frozenset[str]) -> None:
    _REPLICA_IDS[application] = replica_ids


def replica_ids(application: str) -> frozenset[str]:
    return _REPLICA_IDS.get(application, frozenset())
