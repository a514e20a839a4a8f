"""A module with the tensors of a Llama of a given size, for transfers only, not for computation."""

from __future__ import annotations

import re

import torch
from torch import nn

from plaudit.errors import ConfigError

WIDTHS = ((3e6, 128), (3e7, 384), (3e8, 768), (3e9, 2048), (3e10, 4096), (float("inf"), 8192))
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def count_of(text: str) -> int:
    """Parses 100M, 1.5B, 250K or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    count = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if count < 100_000:
        raise ConfigError(f"parameters is {text!r}; expected at least 100K, as in 100M, 1.5B or a plain number")
    return count


class LlamaShaped(nn.Module):
    """A module with about `parameters` parameters, with tied head and embedding. Values are zero."""

    def __init__(self, parameters: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.requested_parameters = parameters
        width = next(width for most, width in WIDTHS if parameters < most)
        vocabulary = min(32_000, parameters // 4 // width)
        layers = max(1, round((parameters - vocabulary * width) / (12 * width * width)))

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.embed_tokens = zeros(vocabulary, width)
        self.lm_head = self.embed_tokens
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                layer.register_parameter(name, zeros(width, width))
            for name in ("gate_proj", "up_proj"):
                layer.register_parameter(name, zeros(width * 8 // 3, width))
            layer.register_parameter("down_proj", zeros(width, width * 8 // 3))
            for name in ("input_norm", "post_norm"):
                layer.register_parameter(name, zeros(width))
            self.layers.append(layer)
        self.norm = zeros(width)
