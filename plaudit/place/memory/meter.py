"""Reads the memory in use on a device, against which the ledger is checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

_CLEAR_REFS, _STATM, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/statm"), Path("/proc/self/status")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter(Protocol):
    device: str
    capacity: int
    """Bytes that the device has."""
    whole: bool
    """Whether it sees the whole process, its code and libraries included, and not tensors alone."""

    def restart(self) -> None:
        """Restart the peak from the current value."""

    def now(self) -> int: ...

    def peak(self) -> int | None:
        """The maximum since the last `restart`; None where it is not measured."""

    def reserved(self) -> int | None:
        """The maximum reserved by an allocator since the last `restart`, in use or not; None without one."""


class CudaMeter:
    """The statistics of the caching allocator."""

    whole = False

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = f"cuda:{self.index}"
        self.capacity = torch.cuda.mem_get_info(self.index)[1]

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.index)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.index)

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.index)


class HostMeter:
    """Resident memory of this process, as Linux counts it."""

    device = "cpu"
    whole = True

    def __init__(self) -> None:
        self.capacity = os.sysconf("SC_PHYS_PAGES") * _PAGE
        # Kept open: they are read twice in every phase.
        self._statm, self._status = (os.open(path, os.O_RDONLY) for path in (_STATM, _STATUS))
        try:
            self._clear: int | None = os.open(_CLEAR_REFS, os.O_WRONLY)
        except OSError:  # some containers do not allow it: then there is no peak
            self._clear = None

    def __del__(self) -> None:
        for file in (self._statm, self._status, self._clear):
            if file is not None:
                os.close(file)

    def restart(self) -> None:
        if self._clear is not None:
            os.write(self._clear, b"5")

    def now(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE

    def peak(self) -> int | None:
        if self._clear is None:
            return None
        status = os.pread(self._status, 4096, 0)
        at = status.index(b"VmHWM:") + 6
        return int(status[at : status.index(b"kB", at)]) * 1024

    def reserved(self) -> None:
        return None


def new_meter(device: torch.device) -> Meter | None:
    """None where nothing measures: a host without Linux's /proc."""
    if device.type == "cuda":
        return CudaMeter(device)
    return HostMeter() if _STATM.exists() else None
