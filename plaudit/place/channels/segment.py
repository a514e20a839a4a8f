"""A memory segment mapped by two processes of one machine: host memory, or a GPU's.

On the CPU it is a memfd, which has no name in any filesystem: other processes open it through /proc/PID/fd of its
creator, and it is freed when the last process that has it exits, also by kill -9. On a GPU it is a separate allocation
by the driver (never part of torch's pool, whose expandable segments cannot be shared), opened by its IPC handle of 64
bytes; the driver frees it with its creator.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch
from torch import Tensor

from plaudit.errors import WeightsRefused
from plaudit.place.channels.cuda_segment import CudaSegment, OpenedCudaSegment
from plaudit.place.channels.messages import CpuHandle, CudaHandle, SegmentHandle


class Segment(Protocol):
    """memory   (bytes,) uint8
    handle   opens it in another process
    """

    memory: Tensor
    handle: SegmentHandle

    def close(self) -> None:
        """Views of the memory must not be used afterwards."""


def make_segment(size: int, device: torch.device) -> Segment:
    if device.type == "cuda":
        return CudaSegment(size, device)
    if device.type == "cpu":
        return CpuSegment(size)
    raise WeightsRefused(f"weights on {device} cannot be shared between processes: set placement.channel to 'disk'")


def open_segment(handle: SegmentHandle) -> Segment:
    return OpenedCudaSegment(handle) if isinstance(handle, CudaHandle) else OpenedCpuSegment(handle)


class CpuSegment:
    def __init__(self, size: int) -> None:
        create = getattr(os, "memfd_create", None)
        if create is None:
            raise WeightsRefused("shared memory needs Linux: set placement.channel to 'disk' or 'collective'")
        self._file: int = create("plaudit-weights")
        os.ftruncate(self._file, size)
        self._map = _mapped(self._file, size)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.handle: SegmentHandle = CpuHandle(os.getpid(), self._file, os.fstat(self._file).st_ino, size)

    def close(self) -> None:
        # The mapping itself is freed with the last tensor that uses it.
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class OpenedCpuSegment:
    def __init__(self, handle: CpuHandle) -> None:
        self.handle: SegmentHandle = handle
        pid = handle.pid
        try:
            file = os.open(f"/proc/{pid}/fd/{handle.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsRefused(
                f"cannot open the shared weights of process {pid}: {error.strerror}; trainer and engine must run on "
                "one machine, as one user, in one container; otherwise set placement.channel to 'disk' or 'collective'"
            ) from error
        try:
            if os.fstat(file).st_ino != handle.inode:
                raise WeightsRefused(f"process {pid} does not share these weights any more: publish again")
            self.memory = torch.frombuffer(_mapped(file, handle.size), dtype=torch.uint8)
        finally:
            os.close(file)

    def close(self) -> None:
        """The mapping is freed with the last tensor that uses it."""


def _mapped(file: int, size: int) -> mmap.mmap:
    # Populated: a page fault for every 4 KiB would cost more than the copy that follows.
    return mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
