"""Rollout workers as a run starts them, and a list of them, for tests that kill or stop one."""

from __future__ import annotations

from plaudit.place.workers.remote_engine import OwnProcess


class RolloutHost:
    """Give `start` as the host of a run. `workers` are those that were started, in order."""

    def __init__(self) -> None:
        self.workers: list[OwnProcess] = []

    def start(self) -> OwnProcess:
        self.workers.append(OwnProcess())
        return self.workers[-1]
