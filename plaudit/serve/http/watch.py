"""Detects changes of files while the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...]


class Watch:
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._read = self._seen = self._signature()

    def read(self) -> None:
        """Record the state of the files; call before reading them."""
        self._read = self._signature()

    def changed(self) -> bool:
        """Whether the files differ from those read and are unchanged since the last call: they may still be being
        written."""
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
