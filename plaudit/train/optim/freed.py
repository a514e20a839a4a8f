"""Returns freed host memory to the system.

On a sharded model whole layers and their gradients are allocated and freed beside a rank's own shards, which stay.
malloc places the shards in freed memory, then has no gap large enough for the next layer, and takes more from the
system: up to half of the size of a rank's tensors.
"""

from __future__ import annotations

import ctypes
import sys

LEAST_BYTES = 32 << 20
"""Freed bytes below which looking for free pages takes more time than it is worth."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # only in glibc


def give_back(freed: int) -> None:
    """Trim malloc's heap after so many freed bytes. A GPU's allocator reuses its memory, and is left alone."""
    if freed >= LEAST_BYTES and _trim is not None:
        _trim(0)
