"""torch and numpy, imported on first use: recipes and plans work without them.

Python 3.15's `lazy import torch` (PEP 810) will replace this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    Tensor = Any  # used in annotations only

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    np, torch = _Lazy("numpy"), _Lazy("torch")

__all__ = ["Tensor", "np", "torch"]
