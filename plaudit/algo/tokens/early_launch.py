"""Kernels that start while the previous one still runs (programmatic dependent launch, on GPUs since Hopper).

A decode step of few rows is hundreds of kernels of a few microseconds each, with idle time between them. A kernel that
begins with `after_previous` is set up while its predecessor finishes, and waits there for its results.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """The first line of a kernel: what follows may read what earlier kernels wrote, and write what they read."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch whose kernel begins with `after_previous`."""
    return {"EARLY": True, "launch_pdl": True} if x.is_cuda and _has_it(x.device) else {"EARLY": False}


@cache
def _has_it(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
