"""A text or a pair of texts as a model's tokenizer writes them, and how they are cut to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plaudit.reward.work import TypedTokens


@dataclass(frozen=True, slots=True)
class Cut:
    """most   tokens that stay; None: all, and more than the model takes are an error
    added  whether what the tokenizer adds stays, as transformers cuts; otherwise it is cut like the rest
    """

    most: int | None = None
    side: Literal["left", "right"] = "right"
    added: bool = True


def fitted(ids: Sequence[int], types: Sequence[int] | None, parts: Sequence[int | None], cut: Cut) -> TypedTokens:
    """The tokens that stay, with their types. `parts` says which text each is of: 0, 1, or None where it was added."""
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
    """What the tokenizer added belongs to neither text. It is not told to cut itself: that would change it for
    others."""
    first = [place for place, part in enumerate(parts) if part == 0]
    second = [place for place, part in enumerate(parts) if part == 1]
    left = max(0, most - (len(parts) - len(first) - len(second)))
    sizes = _shared(len(first), len(second), left) if second else (left, 0)
    staying = {*kept(first, sizes[0], side), *kept(second, sizes[1], side)}
    return [place for place, part in enumerate(parts) if part is None or place in staying][:most]


def _shared(first: int, second: int, total: int) -> tuple[int, int]:
    """How much of each of two texts stays: the longer one is cut first, as transformers does."""
    short, long = sorted((first, second))
    long = short if short > total else max(short, total - short)
    if short + long > total:
        short, long = total // 2, total // 2 + total % 2
    return (long, short) if first > second else (short, long)
