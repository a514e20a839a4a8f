"""Whether this process was started by torchrun."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether somebody else, such as torchrun, starts the ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
