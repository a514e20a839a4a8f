"""A run that waits between two steps, because somebody who looks on has asked for it."""

from __future__ import annotations

import threading
import time

from plaudit.train.run.signals import StopRequest

_POLL_SECONDS = 0.2  # a signal ends the wait as well


class Pause:
    """Any thread may `ask`; the loop of the run waits in `hold`."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.holds = False

    def hold(self, stop: StopRequest) -> float:
        """Wait while a pause is asked for and nobody wants to stop. The seconds it took, which belong to no step."""
        begin = time.monotonic()
        while self.asked.is_set() and not stop:
            self.holds = True
            time.sleep(_POLL_SECONDS)
        if not self.holds:
            return 0.0
        self.holds = False
        return time.monotonic() - begin


PAUSE = Pause()  # of the run of this process
