"""Faults for a server under test, without a line in the product that could cause them.

The processes that tests fork have a few functions changed (tests/serve/injected.py). What they do is in a file that the
test writes and removes while the server runs:

    what      in a step of the model: raise, memory, sticky (an error of a device that is lost), exit, sleep,
              hold (until the test takes the fault away)
              as soon as a worker begins: start (it exits); in the event loop of the HTTP process: block
    tokens    only in a step that computes the item of these token ids
    begins    only in a step that computes an item that begins with these
    once      the first that meets the fault removes it
    seconds   how long to sleep
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


class Faults:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._path = Path(self._directory.name)
        self._file = self._path / "fault"
        self.environment = {"PLAUDIT_FAULT": str(self._file)}

    def set(self, what: str, **details: Any) -> None:
        fresh = self._path / "fresh"
        fresh.write_text(json.dumps({"what": what, **details}))
        fresh.replace(self._file)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)

    @property
    def met(self) -> bool:
        """Whether a fault that happens once has happened."""
        return not self._file.exists()

    def steps(self) -> int:
        """Steps that models have computed, warm-up included."""
        try:
            return (self._path / "fault.steps").stat().st_size
        except FileNotFoundError:
            return 0

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()
