"""Atomic output files: complete at the end, or unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from plaudit.errors import StorageError


def check_writable(out: Path) -> None:
    """Rejects an unwritable path before the work, not after it."""
    if out.is_dir():
        raise StorageError(f"cannot write {out}: it is a directory; expected a file")
    if not out.parent.is_dir():
        raise StorageError(f"cannot write {out}: the directory {out.parent} does not exist; create it first")


@contextmanager
def written(out: Path) -> Iterator[TextIO]:
    """A file to write to. It gets its name when it is complete; after an error nothing has changed."""
    # A device, pipe or link is written to instead of being replaced.
    direct = out.is_symlink() or (out.exists() and not out.is_file())
    path = out if direct else out.with_name(out.name + ".tmp")
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            if not direct:
                os.fsync(file.fileno())
        if not direct:
            path.replace(out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}; free some space or choose another file") from error
    finally:
        if not direct:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
