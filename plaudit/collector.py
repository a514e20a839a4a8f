"""Python's collector of cycles, where it would only cost time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False  # by `uncollected`, which an interruption may end before it has enabled the collector again


@contextmanager
def uncollected() -> Iterator[None]:
    """For work that makes many small objects and no cycles: they make the collector run often, each time over all that
    transformers has loaded. What an interruption left disabled is enabled at the end of the next such work."""
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
    """For a program that has loaded what it needs: the collector no longer walks through that again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
