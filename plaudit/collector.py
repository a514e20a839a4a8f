"""Python's collector of cycles, where it would only cost time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For work that makes many small objects and no cycles: they make the collector run often, each time over all that
    transformers has loaded."""
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """For a program that has loaded what it needs: the collector no longer walks through that again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
