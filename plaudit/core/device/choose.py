"""Selects the back end for a device."""

from __future__ import annotations

from plaudit.core.device.backend import Backend
from plaudit.core.device.cpu import CpuBackend
from plaudit.core.model.decoder import Decoder
from plaudit.errors import PlauditError


def backend_of(decoder: Decoder) -> Backend:
    if decoder.device.type == "cpu":
        return CpuBackend(decoder)
    if decoder.device.type == "cuda":
        from plaudit.core.device.cuda import CudaBackend  # needs Triton, which CPU builds of torch lack

        return CudaBackend(decoder)
    raise PlauditError(f"there is no back end for device {decoder.device}: load the model on the CPU or on a CUDA GPU")
