"""Bit-reproducible gradients on a GPU.

Some of torch's kernels sum by atomics, in the order in which their blocks finish: the backward passes of attention and
of indexing rows. Inside `repeatable` each uses its deterministic variant, and a kernel without one raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from plaudit.errors import RunError

WORKSPACE = ":4096:8"  # cuBLAS: one workspace per stream, as large as its default on a Hopper GPU


@contextmanager
def repeatable(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """Does nothing on a CPU, whose kernels are deterministic for a given number of threads."""
    if device.type != "cuda" or not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it writes every new tensor twice, for debugging
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise RunError(
            f"{str(error).split(',')[0].split('.')[0]}: a bit-reproducible run cannot use it; set "
            "train.deterministic = false to allow it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
