"""What a reward asks of the core, and what it must know of the model behind it."""

from __future__ import annotations

from dataclasses import dataclass


class TypedTokens(list[int]):
    """Token ids, and of an encoder that wants it the type of each: of which text of a pair it is."""

    types: bytes = b""


@dataclass(frozen=True, slots=True)
class Work:
    """What the core must read for one item.

    positions  ascending; the tokens at which to read
    columns    vocabulary tokens of a causal LM, or None for a class head
    steps      how many steps the item has; 0 for an outcome
    logprobs   the columns' log-probs are read, not their logits; NEXT among them is the token that follows
    types      the tokens' types; empty where there are none
    """

    tokens: list[int]
    positions: tuple[int, ...]
    columns: tuple[int, ...] | None
    steps: int
    truncated: bool
    logprobs: bool = False
    types: bytes = b""

    @property
    def cost(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the model is, for those who have no torch. A causal LM has no labels.

    encoder      it reads whole texts in both directions, pairs as its tokenizer writes them
    typed        an encoder's tokens have types
    multi_label  each label of a text is true or not, whatever the others are
    way_to_more  what lifts the limit of positions, where a choice in its config sets it; the end of a message
    """

    name: str
    vocab_size: int
    max_positions: int
    labels: tuple[str, ...]
    causal: bool
    encoder: bool = False
    typed: bool = False
    multi_label: bool = False
    way_to_more: str = ""
