"""Memory that was freed, given back to the system.

Over ranks whole layers and their gradients come and go beside a rank's own parts, which stay. malloc lays what stays
into what was freed, finds no room for the next layer, and takes more from the system: up to half of a rank's tensors.
"""

from __future__ import annotations

import ctypes
import sys

LEAST_BYTES = 32 << 20
"""Of what was freed: for less the pages are not worth their search."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc's alone


def give_back(freed: int) -> None:
    """On the host, where malloc keeps it; a GPU's allocator serves the next one from it."""
    if freed >= LEAST_BYTES and _trim is not None:
        _trim(0)
