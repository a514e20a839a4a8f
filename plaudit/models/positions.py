"""How long a sequence may be for a model, by its config.

Longrope (Phi-3 and 4) has two sets of rotary factors, and transformers takes the long ones for a batch with a sequence
above `original_max_position_embeddings`. Keys that are cached, shared or batched cannot change theirs: a model runs
by its short factors, for sequences up to that length. Dynamic rotary positions change beyond
`max_position_embeddings`, where no sequence gets to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

UNLIMITED = 2**31 - 1
FACTORS = ("short_factor", "long_factor")
SHIFTING = ("dynamic", "longrope")  # rotary embeddings that look at the length of what they are called with


def longest_sequence(config: Any) -> int:
    """Tokens of it."""
    text = _text(config)
    most = getattr(text, "max_position_embeddings", None) or UNLIMITED
    return min([most, *(_original(text, table) for table in rope_tables(text) if _two_sets(table))])


def way_to_more(config: Any) -> str:
    """What lifts a limit that rotary factors set; the end of a message."""
    text = _text(config)
    if longest_sequence(text) < (getattr(text, "max_position_embeddings", None) or UNLIMITED):
        return "; or set short_factor to long_factor in its config.json, for the long rotary factors at every length"
    return ""


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rope_tables(text: Any) -> Iterator[dict[str, Any]]:
    """Rotary parameters: of all layers, or of each kind of them."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [table for table in rope.values() if isinstance(table, dict)]
    yield from nested or [rope]


def _two_sets(table: dict[str, Any]) -> bool:
    short, long = (list(table.get(name) or ()) for name in FACTORS)
    return table.get("rope_type") == "longrope" and short != long


def _original(text: Any, table: dict[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return int(table.get(name) or getattr(text, name, None) or UNLIMITED)
