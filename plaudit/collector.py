"""Disables Python's garbage collector where it would only cost time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False  # by `uncollected`, if an interruption prevented it from enabling the collector again


@contextmanager
def uncollected() -> Iterator[None]:
    """For work that creates many small objects and no cycles: they would trigger the collector often, each time
    scanning all objects of transformers. If an interruption left it disabled, the next such block enables it at its
    end."""
    global _paused
    collecting = gc.isenabled() or _paused
    try:
        _paused = collecting
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()
            _paused = False


@contextmanager
def frozen() -> Iterator[None]:
    """For a program that has loaded what it needs: the collector no longer scans those objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
