"""The free memory of this machine."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def free_memory() -> int | None:
    """Free bytes of this machine's memory; None where the system does not report them."""
    if not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
