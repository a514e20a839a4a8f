"""Run everything in float64, also where a model requests float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Doubles(TorchFunctionMode):
    """Inside this mode float32 means float64, in transformers' code and in ours. Softmax, norms and recurrences, which
    are float32 even in a float64 model, add no rounding error, so any remaining difference is mathematical."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_double, args), **{name: _double(value) for name, value in (kwargs or {}).items()})


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
