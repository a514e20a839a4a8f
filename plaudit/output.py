"""Files that a command writes: whole at the end, or as they were before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from plaudit.errors import StorageError


def check_writable(out: Path) -> None:
    """Refuse before the work, not after it."""
    if out.is_dir():
        raise StorageError(f"cannot write {out}: it is a directory; name a file in it")
    if not out.parent.is_dir():
        raise StorageError(f"cannot write {out}: there is no directory {out.parent}; make it first")


@contextmanager
def written(out: Path) -> Iterator[TextIO]:
    """A file to write to. It takes its name when all of it is there; after any error nothing has changed."""
    # A device, a pipe or a link is to be written to, not replaced.
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
        raise StorageError(f"cannot write {out}: {error.strerror}; free some space or name another file") from error
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
