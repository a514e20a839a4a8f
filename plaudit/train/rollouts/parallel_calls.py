"""Calls of somebody else's code, several at a time, each with a time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """The call did not come back in time. Its thread is left behind: Python cannot stop one."""


class SideBySide(Generic[T]):
    """The threads are daemons, made for each round: one that never comes back keeps nobody from leaving."""

    def __init__(self, threads: int, seconds: float) -> None:
        self.threads = threads
        self.seconds = seconds

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """What each call gave or raised, in order."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        over: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()
        running: dict[int, float] = {}  # call -> when it began
        given_up: set[int] = set()
        for number in range(len(calls)):
            waiting.put(number)

        def work() -> None:
            number = -1
            while number not in given_up:  # then another thread works in this one's place
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                running[number] = time.monotonic()
                try:
                    over.put((number, calls[number]()))
                except Exception as error:
                    over.put((number, error))

        results: dict[int, T | Exception] = {}
        self._start(min(self.threads, len(calls)), work)
        while len(results) < len(calls):
            oldest = min(running.copy().values(), default=time.monotonic())
            try:
                number, result = over.get(timeout=max(0.001, oldest + self.seconds - time.monotonic()))
                results.setdefault(number, result)
                running.pop(number, None)
            except queue.Empty:
                late = [n for n, since in running.copy().items() if time.monotonic() - since >= self.seconds]
                for number in late:
                    given_up.add(number)
                    del running[number]
                    results[number] = Overdue(f"no answer in {self.seconds:g} s")
                self._start(len(late), work)
        return [results[number] for number in range(len(calls))]

    @staticmethod
    def _start(count: int, work: Callable[[], None]) -> None:
        for _ in range(count):
            threading.Thread(target=work, daemon=True, name="environment").start()
