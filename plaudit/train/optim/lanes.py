"""How many threads work side by side on models whose products are too small to be shared out among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NARROW = 192  # hidden units


def lanes(threads: int | None, *modules: nn.Module) -> int:
    """One unless these are narrow models in float32 on a CPU; then each thread has work of its own."""
    for module in modules:
        config: Any = module.config
        weight = next(module.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or config.hidden_size >= NARROW:
            return 1
    return threads or 1
