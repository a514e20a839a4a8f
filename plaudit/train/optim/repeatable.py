"""Gradients that are the same to the bit each time, on a GPU.

Some of torch's kernels add up by atomics, in whatever order their blocks come: the backward passes of attention and of
taking rows. Inside `repeatable` each takes its variant with one order, and one that has none raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from plaudit.errors import RunError

WORKSPACE = ":4096:8"  # cuBLAS: workspaces of a stream's own, as large as its default on a Hopper card


@contextmanager
def repeatable(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """A CPU's kernels have one order already, for one number of threads."""
    if device.type != "cuda" or not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor twice
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise RunError(
            f"{str(error).split(',')[0].split('.')[0]}: a run that can be made again to the bit cannot use it; set "
            "train.deterministic = false to do without"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
