"""Checks that the requested GPU exists and is supported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from plaudit.errors import ConfigError

LEAST = (8, 0)  # bfloat16, and torch's flash attention
SMALLEST = "sums-grpo"  # the smallest training recipe, for which a CPU is enough


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that torch sees.

    built_for  the architectures that torch is compiled for, such as sm_90; empty if it sees no GPU
    cuda       the CUDA version that torch is built with, if any
    """

    there: tuple[Gpu, ...]
    built_for: tuple[str, ...]
    cuda: str | None


@lru_cache(maxsize=1)
def gpus_here() -> Gpus:
    cuda = torch.cuda
    devices = tuple(
        Gpu(cuda.get_device_name(index), cuda.get_device_capability(index))
        for index in range(cuda.device_count() if cuda.is_available() else 0)
    )
    return Gpus(devices, tuple(cuda.get_arch_list()), torch.version.cuda)


def check_device(device: str, gpus: Gpus | None = None) -> None:
    """Raise ConfigError if `device` is a GPU that cannot be used."""
    if not device.startswith("cuda"):
        return
    gpus = gpus or gpus_here()
    if not gpus.there:
        why = "torch sees no GPU" if gpus.cuda else "this torch is built without CUDA"
        raise ConfigError(f"device = {device!r} is a GPU, and {why}: {_cure()}")
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpus.there):
        raise ConfigError(
            f"device = {device!r}, and there are {len(gpus.there)} GPU(s): cuda:0 is the first; {_cure()}"
        )
    gpu = gpus.there[index]
    had = ".".join(map(str, gpu.capability))
    if gpu.capability < LEAST:
        raise ConfigError(
            f"{gpu.name} ({device}) has compute capability {had}, and the kernels need {LEAST[0]}.{LEAST[1]} or more: "
            f"{_cure()}"
        )
    if not any(_runs(arch, gpu.capability) for arch in gpus.built_for):
        raise ConfigError(
            f"{gpu.name} ({device}) has compute capability {had}, and this torch is built for "
            f"{', '.join(gpus.built_for)}: install one that is built for it; {_cure()}"
        )


def memory_ran_out(error: BaseException) -> str | None:
    """Return a message for the user if this is torch's out-of-memory error."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    why = str(error).removeprefix("CUDA out of memory. ").split(" GPU ")[0]
    return (
        f"the GPU's memory ran out ({why}): lower train.micro_batch_tokens, engine.kv_bytes or prm.kv_bytes, or in RL "
        f'set placement.name = "swapped"; the smallest recipe, which needs no GPU, is {SMALLEST}'
    )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether compiled code runs: sm code on later GPUs of its generation, PTX on all later ones."""
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    built = (int(digits[:-1]), int(digits[-1]))
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def _cure() -> str:
    return f'set device = "cpu"; the smallest recipe that runs there is {SMALLEST}'
