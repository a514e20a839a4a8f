"""torch and numpy, imported when something is first computed: a recipe is read and a plan made without them.

`lazy import torch` of Python 3.15 (PEP 810) will say the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    Tensor = Any  # it stands in annotations alone

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    np, torch = _Lazy("numpy"), _Lazy("torch")

__all__ = ["Tensor", "np", "torch"]
