"""The number of KV blocks of an engine, and memory limits."""

from __future__ import annotations

import os
import resource

import torch

from plaudit.core.model.decoder import Decoder
from plaudit.errors import RequestError

DEFAULT_BYTES = 512 * 2**20  # of host memory
DEFAULT_PART = 0.4  # of a GPU's free memory


def blocks_for(
    decoder: Decoder, block_size: int, kv_bytes: int | float | None, max_running: int, spare: int = 0, states: int = 0
) -> int:
    """The number of blocks that fit in `kv_bytes`, minus the back end's `spare` blocks and the bytes of `states`.

    kv_bytes   a whole number: bytes; below 1: that fraction of the free memory; None: a default, or less if
               max_running sequences of maximum length need less
    """
    size, block_bytes = pool_bytes(decoder, kv_bytes) - states, decoder.token_bytes() * block_size
    if kv_bytes is None:
        most = -(-decoder.max_positions // block_size) * max_running
        return max(1, min(size // block_bytes - spare, most))
    needed = (1 + spare) * block_bytes
    if size < needed:
        raise RequestError(
            f"kv_bytes gives {size} bytes, but one block of {block_size} tokens needs {needed}: raise kv_bytes"
        )
    return size // block_bytes - spare


def pool_bytes(decoder: Decoder, kv_bytes: int | float | None) -> int:
    """`kv_bytes` in bytes."""
    if kv_bytes is None:
        on_gpu = decoder.device.type == "cuda"
        return int(DEFAULT_PART * free_bytes(decoder.device)) if on_gpu else DEFAULT_BYTES
    if isinstance(kv_bytes, float) and 0 < kv_bytes < 1:
        return int(kv_bytes * free_bytes(decoder.device))
    if kv_bytes >= 1 and kv_bytes == int(kv_bytes):
        return int(kv_bytes)
    raise RequestError(f"kv_bytes is {kv_bytes}, but must be a whole number of bytes or a fraction between 0 and 1")


def free_bytes(device: torch.device) -> int:
    """The memory that this process may still allocate."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return min(free, allowed - torch.cuda.memory_reserved(device))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


def limit_memory(device: str, fraction: float) -> None:
    """Limit this process to a fraction of the device's memory, or of the host's for a CPU. Allocations beyond it fail
    as if the memory had run out."""
    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device))
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (int(fraction * total), resource.getrlimit(resource.RLIMIT_DATA)[1]))
