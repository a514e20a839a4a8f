"""Checks torch's devices: a matrix product on the CPU and on every GPU, compared with double precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from plaudit.doctor.finding import Finding, failed, ok, warning
from plaudit.errors import ConfigError
from plaudit.models.gpu import check_device, gpus_here

DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
SIZE, TOLERANCE = 256, 1e-3  # relative; TF32 has ten bits


def devices() -> Iterator[Finding]:
    detail = f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    if _product_is_right("cpu"):
        yield ok("devices", f"{detail}, matrix products on the CPU are correct")
    else:
        yield failed(
            "devices", f"{detail}: a matrix product on the CPU is wrong", "reinstall torch, or test the memory"
        )
    gpus = gpus_here()
    if not gpus.there and any(Path(driver).exists() for driver in DRIVERS):
        why = f"this torch is built for CUDA {gpus.cuda}" if gpus.cuda else "this torch is built without CUDA"
        cure = "install torch for your CUDA (pytorch.org), or a newer driver; nvidia-smi shows the GPUs"
        yield failed("devices", f"there is an NVIDIA driver, but torch sees no GPU: {why}", cure)
    elif not gpus.there:
        yield ok("devices", "no GPU: everything runs on the CPU")
    for index in range(len(gpus.there)):
        yield _gpu(index)


def _gpu(index: int) -> Finding:
    device, gpu = f"cuda:{index}", gpus_here().there[index]
    try:
        check_device(device)
        right = _product_is_right(device)
        free, whole = torch.cuda.mem_get_info(index)
    except ConfigError as error:
        return failed("devices", str(error), "set CUDA_VISIBLE_DEVICES to other devices")
    except RuntimeError as error:
        return failed("devices", f"{device} ({gpu.name}): {str(error).splitlines()[0]}", "nvidia-smi shows its state")
    detail = f"{device} ({gpu.name}), {free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"
    if not right:
        return failed(
            "devices",
            f"{detail}: a matrix product is wrong",
            "exclude it with CUDA_VISIBLE_DEVICES, and have it repaired",
        )
    if free < whole / 2:
        return warning("devices", detail, "another process uses the rest: nvidia-smi shows it")
    return ok("devices", f"{detail}, matrix products are correct")


def _product_is_right(device: str) -> bool:
    a, b = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    expected = a.double() @ b.double()
    got = (a.to(device) @ b.to(device)).cpu().double()
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())
