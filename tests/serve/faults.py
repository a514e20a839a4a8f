"""Injects faults into a server under test, without fault code in the product.

tests/serve/injected.py patches a few functions in the processes that tests fork. The fault is described in a file that
the test writes and removes while the server runs:

    what      in a step of the model: raise, memory, sticky (an error of a device that is lost), exit, sleep,
              hold (until the test clears the fault)
              when a worker starts: start (it exits); in the event loop of the HTTP process: block
    tokens    only in a step that computes the item with these token ids
    begins    only in a step that computes an item that begins with these token ids
    once      the first process that meets the fault removes it
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
        """Whether a one-time fault has occurred."""
        return not self._file.exists()

    def steps(self) -> int:
        """The number of steps that models have computed, including warm-up."""
        try:
            return (self._path / "fault.steps").stat().st_size
        except FileNotFoundError:
            return 0

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()
