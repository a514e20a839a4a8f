"""Training: the loop, what is learned (SFT, rewards, step rewards), and the state of a run.

`plaudit.train(...)` is a run; the package is also what it is made of.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    """The package can be called, so that the verb and the part have one name. What it calls drives the loop, and so is
    above this package: it is found when it is called."""

    def __call__(self, *recipe: Any, **options: Any) -> Any:
        return import_module("plaudit.api").train(*recipe, **options)


sys.modules[__name__].__class__ = _Train
