"""The diagnosis rule of memory: where it is fullest, and its owners."""

from __future__ import annotations

from plaudit.report.finding import Finding
from plaudit.report.history import History

_NEARLY_FULL = 0.9


def fullest_phase(run: History) -> Finding | None:
    """The phase of the device that comes closest to its capacity."""
    devices = run.memory
    if not devices:
        return None
    device = max(devices, key=lambda line: line.peak.total / (line.peak.capacity or float("inf")))
    full = device.peak.capacity is not None and device.peak.total > _NEARLY_FULL * device.peak.capacity
    if full:
        return Finding("memory nearly full", "watch", device.bottleneck(), device.cure())
    return Finding("memory", "fine", device.bottleneck())
