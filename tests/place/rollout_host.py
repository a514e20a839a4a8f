"""Starts rollout workers as a run does and lists them, for tests that kill or stop one."""

from __future__ import annotations

from plaudit.place.workers.remote_engine import OwnProcess


class RolloutHost:
    """Pass `start` as the host of a run. `workers` are the started workers, in order."""

    def __init__(self) -> None:
        self.workers: list[OwnProcess] = []

    def start(self) -> OwnProcess:
        self.workers.append(OwnProcess())
        return self.workers[-1]
