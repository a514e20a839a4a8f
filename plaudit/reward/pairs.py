"""Tokenised texts or pairs of texts, and their truncation to the model's limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plaudit.reward.work import TypedTokens


@dataclass(frozen=True, slots=True)
class Cut:
    """most   the number of tokens to keep; None: all, and more than the model's limit is an error
    added  whether special tokens are kept, as transformers does; otherwise they are truncated like the rest
    """

    most: int | None = None
    side: Literal["left", "right"] = "right"
    added: bool = True


def fitted(ids: Sequence[int], types: Sequence[int] | None, parts: Sequence[int | None], cut: Cut) -> TypedTokens:
    """The truncated tokens, with their types. `parts` has each token's text: 0, 1, or None for special tokens."""
    places = list(range(len(ids)))
    if cut.most is not None and len(ids) > cut.most:
        places = _staying(parts, cut.most, cut.side) if cut.added else kept(places, cut.most, cut.side)
    tokens = TypedTokens(ids[place] for place in places)
    if types is not None:
        tokens.types = bytes(types[place] for place in places)
    return tokens


def kept(ids: list[int], most: int | None, side: str) -> list[int]:
    if most is None or len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if side == "left" else ids[:most]


def _staying(parts: Sequence[int | None], most: int, side: str) -> list[int]:
    """Indices of the tokens to keep. Special tokens belong to neither text. The tokenizer's own truncation is not used,
    because that setting would affect other users of it."""
    first = [place for place, part in enumerate(parts) if part == 0]
    second = [place for place, part in enumerate(parts) if part == 1]
    left = max(0, most - (len(parts) - len(first) - len(second)))
    sizes = _shared(len(first), len(second), left) if second else (left, 0)
    staying = {*kept(first, sizes[0], side), *kept(second, sizes[1], side)}
    return [place for place, part in enumerate(parts) if part is None or place in staying][:most]


def _shared(first: int, second: int, total: int) -> tuple[int, int]:
    """The number of tokens to keep of each text: the longer one is truncated first, as transformers does."""
    short, long = sorted((first, second))
    long = short if short > total else max(short, total - short)
    if short + long > total:
        short, long = total // 2, total // 2 + total % 2
    return (long, short) if first > second else (short, long)
