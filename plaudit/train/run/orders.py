"""Messages from the main rank to the others: values that they wait for, and orders that they execute while waiting.

The main rank may need the others at any time during a wait: a rollout process that replaces a lost one receives its
weights from the shards of all of them. So a rank that waits for a value executes orders until the value arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plaudit.train.run.ranks import Group


class Message(msgspec.Struct):
    """An order or a value."""

    order: bytes | None = None
    value: bytes = b""


class Orders:
    """carry_out   on the other ranks: executes an order; it must not raise if the order fails"""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.carry_out: Callable[[bytes], None] | None = None

    def give(self, order: bytes) -> None:
        """Send an order from the main rank, while the others wait for a value."""
        self.group.from_main(Message(order))

    def value(self, value: Any, kind: Any = Any) -> Any:
        """The main rank's value, on every rank."""
        if self.group.index == 0:
            if self.group.size > 1:
                self.group.from_main(Message(value=msgspec.msgpack.encode(value)))
            return value
        while True:
            message: Message = self.group.from_main(None, Message)
            if message.order is None:
                return msgspec.msgpack.decode(message.value, type=kind)
            assert self.carry_out is not None, "carry_out must be set before orders are given"
            self.carry_out(message.order)
