"""The trunk's forward pass in training, with fused kernels where it runs on a GPU in half precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plaudit.core.model.packing import Packed, hidden_rows, trunk
from plaudit.core.model.varlen import HALF

if TYPE_CHECKING:
    from plaudit.core.model.fusion import Fusion

_FUSIONS: WeakKeyDictionary[nn.Module, Fusion] = WeakKeyDictionary()


def fused_rows(module: nn.Module, packed: Packed) -> Tensor:
    """Final hidden states of every packed token, (T, hidden)."""
    fusion = _fusion(module)
    with nullcontext() if fusion is None else fusion.applied():
        return hidden_rows(module, packed)


def _fusion(module: nn.Module) -> Fusion | None:
    base = trunk(module)
    # Sharded weights are whole inside their layer alone. Layers that compute themselves again in the backward pass do
    # so out of reach of what holds in the forward pass.
    parameter = next(base.parameters())
    again = any(getattr(part, "gradient_checkpointing", False) for part in base.modules())
    if not parameter.is_cuda or parameter.dtype not in HALF or isinstance(parameter, DTensor) or again:
        return None
    if module not in _FUSIONS:
        from plaudit.core.model.fusion import Fusion  # brings triton

        _FUSIONS[module] = Fusion(base)
    return _FUSIONS[module]
