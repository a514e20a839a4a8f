"""GPU memory mapped by two processes, with the driver API itself, since torch's sharing needs files in /dev/shm."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from plaudit.errors import WeightsRefused
from plaudit.place.channels.messages import CudaHandle, SegmentHandle

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaSegment:
    def __init__(self, size: int, device: torch.device) -> None:
        self._device = _ready(device)
        pointer = ctypes.c_uint64()
        with torch.cuda.device(self._device):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            handle = _Handle()
            _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        self._pointer = pointer
        self.memory = _tensor(pointer.value, size, self._device)
        self.handle: SegmentHandle = CudaHandle(bytes(handle.reserved), size, _uuid(self._device))

    def close(self) -> None:
        if self._pointer.value:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _call("cuMemFree_v2", self._pointer)
            self._pointer = ctypes.c_uint64()


class OpenedCudaSegment:
    def __init__(self, handle: CudaHandle) -> None:
        self.handle: SegmentHandle = handle
        self._device = _ready(_device_of(handle.gpu))
        raw = _Handle.from_buffer_copy(handle.ipc)
        pointer = ctypes.c_uint64()
        with torch.cuda.device(self._device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), raw, ctypes.c_uint(LAZY_PEER_ACCESS))
        self._pointer = pointer
        self.memory = _tensor(pointer.value, handle.size, self._device)

    def close(self) -> None:
        if self._pointer.value:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _call("cuIpcCloseMemHandle", self._pointer)
            self._pointer = ctypes.c_uint64()


class _Memory:
    """The interface by which torch wraps memory that it did not allocate."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _tensor(pointer: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Memory(pointer, size), device=device)


def _ready(device: torch.device) -> torch.device:
    """The device with an index, and with torch's context current in this thread, which the driver's calls use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    torch.zeros(1, device=device)
    return device


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_of(uuid: str) -> torch.device:
    """GPU indices differ between processes (CUDA_VISIBLE_DEVICES); their UUIDs do not."""
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise WeightsRefused(
        f"the shared weights are on GPU {uuid}, which the engine does not see: trainer and engine must share a GPU, or "
        "set placement.channel to 'disk' or 'collective'"
    )


def refused(name: str, reason: str) -> WeightsRefused:
    """The error for a driver without IPC, such as that of some virtual machines and containers."""
    return WeightsRefused(
        f"the CUDA driver refused to share memory between processes ({name}: {reason}): set placement.channel = "
        '"disk" or "collective"; recipes of one process share nothing, and the smallest is sums-grpo'
    )


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {code}"
        raise refused(name, reason)
