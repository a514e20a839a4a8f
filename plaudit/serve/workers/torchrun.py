"""Detects whether this process was started by torchrun."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether the ranks are started by torchrun or another launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
