"""JSON log lines on stderr: events, never texts. A full disk or a slow reader does not block requests."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

WAITING_LINES = 10_000


class Log:
    """A thread writes the lines; when it falls behind, lines are dropped and counted by `on_failure`."""

    def __init__(self, on_failure: Callable[[], None], file: int | None = None) -> None:
        self._file = sys.stderr.fileno() if file is None else file
        self._on_failure = on_failure
        self._lines: queue.Queue[bytes | None] = queue.Queue(WAITING_LINES)
        self._thread = threading.Thread(target=self._write, daemon=True, name="log")
        self._thread.start()

    def __call__(self, event: str, **fields: Any) -> None:
        # escapes CR, LF and other control characters
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        try:
            self._lines.put_nowait(line.encode() + b"\n")
        except queue.Full:
            self._on_failure()

    def close(self, seconds: float = 1.0) -> None:
        """Write the queued lines, waiting at most `seconds`."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._file, line) :]
            except OSError:
                self._on_failure()
