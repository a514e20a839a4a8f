"""SIGTERM and SIGINT as a wish to stop, which a loop grants when its state can be saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plaudit.errors import RunError


class Interrupted(RunError):
    """SIGTERM came: the state is saved, `--resume` goes on."""


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that stops being empty when SIGTERM or SIGINT comes; a second one ends the process at once."""
    came: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
