"""Float64 throughout, also where a model asks for float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Doubles(TorchFunctionMode):
    """Within it float32 means float64, to transformers' code and to ours: softmax, norms and recurrences, which are
    float32 in a model of float64 too, have no roundings of their own, and what is left of a difference is one of the
    mathematics."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_double, args), **{name: _double(value) for name, value in (kwargs or {}).items()})


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
