"""Maximum sequence length of a model, by its config.

Longrope (Phi-3 and 4) has two sets of rotary factors, and transformers uses the long ones for a batch with a sequence
above `original_max_position_embeddings`. Cached, shared or batched keys cannot change theirs, so a model runs with its
short factors, for sequences up to that length. Dynamic rotary positions change only beyond `max_position_embeddings`,
which no sequence reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

UNLIMITED = 2**31 - 1
FACTORS = ("short_factor", "long_factor")
SHIFTING = ("dynamic", "longrope")  # rotary embeddings that look at the length of what they are called with


def longest_sequence(config: Any) -> int:
    """Return the maximum sequence length in tokens."""
    text = _text(config)
    most = getattr(text, "max_position_embeddings", None) or UNLIMITED
    return min([most, *(_original(text, table) for table in rope_tables(text) if _two_sets(table))])


def way_to_more(config: Any) -> str:
    """Return the end of a message: how to raise a limit set by rotary factors; "" if there is none."""
    text = _text(config)
    if longest_sequence(text) < (getattr(text, "max_position_embeddings", None) or UNLIMITED):
        return "; or set short_factor to long_factor in its config.json, for the long rotary factors at every length"
    return ""


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rope_tables(text: Any) -> Iterator[dict[str, Any]]:
    """Yield rotary parameters: of all layers, or per layer type."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [table for table in rope.values() if isinstance(table, dict)]
    yield from nested or [rope]


def _two_sets(table: dict[str, Any]) -> bool:
    short, long = (list(table.get(name) or ()) for name in FACTORS)
    return table.get("rope_type") == "longrope" and short != long


def _original(text: Any, table: dict[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return int(table.get(name) or getattr(text, name, None) or UNLIMITED)
