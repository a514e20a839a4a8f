"""What a reward requests from the engine, and what it needs to know about its model."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class TypedTokens(list[int]):
    """Token ids; for an encoder with token types also the type of each, which says to which text of a pair it
    belongs."""

    types: bytes = b""


class Work(msgspec.Struct, frozen=True):
    """The values to read for one item.

    positions  ascending; the tokens at which values are read
    columns    vocabulary tokens of a causal LM, or None for a classification head
    steps      the number of steps of the item; 0 for an outcome
    logprobs   read the columns' log-probs instead of logits; NEXT is the token that follows
    types      token types; empty if there are none
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
    """Information about the model that needs no torch. A causal LM has no labels.

    encoder      it reads whole texts bidirectionally, pairs as its tokenizer formats them
    typed        an encoder's tokens have types
    multi_label  the labels of a text are independent
    way_to_more  how to raise the limit of positions, if its config allows that; the end of a message
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
