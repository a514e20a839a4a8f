"""What the main rank says to the others: values that they wait for, and orders that they carry out while they wait.

The main rank may need the others at any time of a wait: a rollout process that takes a lost one's place gets its
weights from the shards of all of them. So whoever waits for a value of the main rank's carries out orders until it is
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plaudit.train.run.ranks import Group


class Word(msgspec.Struct):
    """One of the two."""

    order: bytes | None = None
    value: bytes = b""


class Orders:
    """carry_out   of the other ranks: what an order makes them do; it must not raise because the order failed"""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.carry_out: Callable[[bytes], None] | None = None

    def give(self, order: bytes) -> None:
        """By the main rank, while the others wait for a value."""
        self.group.from_main(Word(order))

    def value(self, value: Any, kind: Any = Any) -> Any:
        """The main rank's value, on each of them."""
        if self.group.index == 0:
            if self.group.size > 1:
                self.group.from_main(Word(value=msgspec.msgpack.encode(value)))
            return value
        while True:
            word: Word = self.group.from_main(None, Word)
            if word.order is None:
                return msgspec.msgpack.decode(word.value, type=kind)
            assert self.carry_out is not None, "whoever gives orders says how they are carried out"
            self.carry_out(word.order)
