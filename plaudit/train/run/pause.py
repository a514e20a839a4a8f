"""Pauses a run between two steps on request, for instance from the live page."""

from __future__ import annotations

import threading
import time

from plaudit.train.run.signals import StopRequest

_POLL_SECONDS = 0.2  # so that a signal ends the wait too


class Pause:
    """Any thread may set `requested`; the training loop waits in `wait`."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.waiting = False

    def wait(self, stop: StopRequest) -> float:
        """Wait while a pause is requested and no stop is. Return the seconds waited, which belong to no step."""
        begin = time.monotonic()
        while self.requested.is_set() and not stop:
            self.waiting = True
            time.sleep(_POLL_SECONDS)
        if not self.waiting:
            return 0.0
        self.waiting = False
        return time.monotonic() - begin


PAUSE = Pause()  # of the run of this process
