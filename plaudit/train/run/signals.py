"""SIGTERM and SIGINT as stop requests, which a loop honours when its state can be saved.

Waits for an unreachable server or for rollouts of another process may be long. A block in `leave_on_signal` is
interrupted at once, because it has not changed any state that a checkpoint would miss.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plaudit.errors import RunError

LAST_SECONDS = 3.0  # after a signal: timeout for a server that is needed to save the state


class Interrupted(RunError):
    """SIGTERM or SIGINT was received."""


class StopRequest:
    """True after a signal; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.leaving = 0
        self.granted = False

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def leave(self) -> None:
        if self.signal_name is not None and self.leaving and not self.granted:
            self.granted = True  # saving the state, which follows, is not interrupted
            raise Interrupted(f"stopped by {self.signal_name}")


_current: StopRequest | None = None


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    global _current
    request = StopRequest()

    def remember(number: int, _: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        request.signal_name = signal.Signals(number).name
        request.leave()

    # Python delivers signals to the main thread only: a run in another thread continues to its end.
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
    """Raise Interrupted within this block on a signal, or if one was received before. Outside the main thread, or if
    not `allowed`, the block runs to its end."""
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
    """Send SIGTERM to this process, from any thread. Return False, without a signal, if no training loop runs yet."""
    if _current is None:
        return False
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def stop_requested() -> bool:
    return bool(_current)


def patience_left(seconds: float) -> float:
    """Return the timeout for a server: short after a stop request."""
    return min(seconds, LAST_SECONDS) if _current else seconds
