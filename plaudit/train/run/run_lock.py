"""The lock of a run directory: one writer at a time. The OS releases it even if the process is killed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from plaudit.errors import RunBusy, StorageError


def locked(directory: Path) -> int:
    """Create the directory and lock it until the returned file descriptor is closed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot use the run directory {directory}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode() or "unknown"
        os.close(lock)
        raise RunBusy(
            f"{directory} is in use by process {holder}; wait for it, or set another directory with --out"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock
