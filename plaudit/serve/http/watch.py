"""Files that may change while the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...]


class Watch:
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._read = self._seen = self._signature()

    def read(self) -> None:
        """The files are about to be read."""
        self._read = self._signature()

    def changed(self) -> bool:
        """Whether they are others than were read, and the same as at the last look: somebody may be writing them."""
        before, self._seen = self._seen, self._signature()
        return before == self._seen != self._read

    def _signature(self) -> Signature:
        return tuple(map(_signature, self._files))


def _signature(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
