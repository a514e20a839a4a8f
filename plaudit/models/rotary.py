"""Rotary embeddings that look at a sequence's length: which lengths the core runs, and their angles held.

With longrope a sequence longer than the model was first trained on has other angles at every position, its first ones
too, so that a cached key would be another one. The core runs what is no longer than that. "dynamic" angles change
beyond max_position_embeddings alone, where the core stops anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

MOVING = frozenset({"dynamic", "longrope"})


def steady_positions(config: Any) -> int | None:
    """How long a sequence may be before its positions turn by other angles; None: as long as it may be at all."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    borders = [
        table.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for table in rope_tables(text)
        if table.get("rope_type") == "longrope"
    ]
    return min((border for border in borders if border), default=None)


def rope_tables(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a config: one table, or one for each kind of layer."""
    table = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in table:
        yield table
    else:
        yield from (each for each in table.values() if isinstance(each, dict))


def hold_rotary(module: nn.Module) -> None:
    """Let rotary embeddings keep the angles they have: they would look at the largest position of a whole packed row,
    which a graph cannot do."""
    for part in module.modules():
        kind: Any = getattr(part, "rope_type", None)
        if isinstance(kind, Mapping):
            part.rope_type = {layer: "default" if name in MOVING else name for layer, name in kind.items()}  # type: ignore[assignment]
        elif kind in MOVING:
            part.rope_type = "default"  # type: ignore[assignment]
