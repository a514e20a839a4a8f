"""SIGTERM and SIGINT as a wish to stop, which a loop grants when its state can be saved.

A wait may be long: for a server that is away, for rollouts of another process. What is left at once when a signal
comes, because nothing has changed yet that a checkpoint would miss, runs in `leave_on_signal`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plaudit.errors import RunError

LAST_SECONDS = 3.0  # for a server that the saving of the state needs, once a signal has come


class Interrupted(RunError):
    """SIGTERM or SIGINT came."""


class StopRequest:
    """True when a signal has come; a second one ends the process at once."""

    def __init__(self) -> None:
        self.came: str | None = None
        self.leaving = 0
        self.granted = False

    def __bool__(self) -> bool:
        return self.came is not None

    def leave(self) -> None:
        if self.came is not None and self.leaving and not self.granted:
            self.granted = True  # what follows saves the state, and is not left
            raise Interrupted(f"stopped by {self.came}")


_current: StopRequest | None = None


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    global _current
    request = StopRequest()

    def remember(number: int, _: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        request.came = signal.Signals(number).name
        request.leave()

    # Python hears signals in the main thread alone: a run in another one goes on until it ends.
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, remember) for number in signals}
    _current = request
    try:
        yield request
    finally:
        _current = None
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leave_on_signal(allowed: bool = True) -> Iterator[None]:
    """Raises Interrupted in this block when a signal comes, or has come. Elsewhere than in the main thread, and where
    it is not `allowed`, the block runs to its end."""
    request = _current
    if request is None or not allowed or threading.current_thread() is not threading.main_thread():
        yield
        return
    request.leaving += 1
    try:
        request.leave()
        yield
    finally:
        request.leaving -= 1


def request_stop() -> bool:
    """SIGTERM to this process, from any thread. False, and none, where no loop is there yet that could save a state."""
    if _current is None:
        return False
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def stop_requested() -> bool:
    return bool(_current)


def patience_left(seconds: float) -> float:
    """How long a server may be waited for: once a signal has come, not for long."""
    return min(seconds, LAST_SECONDS) if _current else seconds
