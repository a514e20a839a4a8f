"""Training: the loop, what is learned (SFT, rewards, step rewards), and the state of a run.

`plaudit.train(...)` is a run; the package is also what it is made of.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    """Makes the package callable as `plaudit.train(...)`. The function is in a higher layer, so it is imported on
    call."""

    def __call__(self, *recipe: Any, **options: Any) -> Any:
        return import_module("plaudit.api").train(*recipe, **options)


sys.modules[__name__].__class__ = _Train
