"""The trunk's forward pass in training, with fused kernels on a GPU in half precision and on a CPU in float32."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plaudit.algo.tokens.products import needs_steadying
from plaudit.core.model import operations
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.packing import Packed, hidden_rows, trunk
from plaudit.core.model.varlen import HALF

_FUSIONS: WeakKeyDictionary[nn.Module, Fusion] = WeakKeyDictionary()
_MAKING = threading.Lock()


class _Applied(threading.local):
    """The fusions active in this thread's forward passes, and whether their products have few rows and need
    steadying."""

    def __init__(self) -> None:
        self.passes: list[tuple[Fusion, bool]] = []


_APPLIED = _Applied()


def fused_rows(module: nn.Module, packed: Packed) -> Tensor:
    """Final hidden states of every packed token, (T, hidden)."""
    fusion = _fusion(module)
    if fusion is None:
        return hidden_rows(module, packed)
    steady = needs_steadying(packed.input_ids.shape[1], packed.input_ids.device)
    _APPLIED.passes.append((fusion, steady))
    try:
        with fusion.applied(steady):
            return hidden_rows(module, packed)
    finally:
        _APPLIED.passes.pop()


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `context_fn` of torch's checkpoint: a layer recomputed in the backward pass, in an autograd thread, uses the
    kernels of its forward pass."""
    if not _APPLIED.passes:
        return nullcontext(), nullcontext()
    fusion, steady = _APPLIED.passes[-1]
    return nullcontext(), fusion.applied(steady)


def _fusion(module: nn.Module) -> Fusion | None:
    base = trunk(module)
    parameter = next(base.parameters())
    # Sharded weights are whole only inside their layer.
    if parameter.dtype not in (HALF if parameter.is_cuda else (torch.float32,)) or isinstance(parameter, DTensor):
        return None
    with _MAKING:
        if module not in _FUSIONS:
            if parameter.is_cuda:
                from plaudit.core.model import differentiable  # imports triton

                _FUSIONS[module] = Fusion(base, differentiable)
            else:
                _FUSIONS[module] = Fusion(base, operations)
        return _FUSIONS[module]
