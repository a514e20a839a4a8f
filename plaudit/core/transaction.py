"""Transactions: a change of the engine's state that fails with any exception leaves no inconsistent state behind.

Prompts are inserted in the tree and copies counted before they are computed, so an exception in between (Ctrl-C raises
one anywhere) would leave a tree that claims KV which was never computed. Every change is a `transaction`: after an
exception the state is rebuilt, at once or, if a second exception interrupts that, before the next change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Transactional(ABC):
    """Base class of classes whose methods are transactions."""

    def __init__(self) -> None:
        self.active = False  # a transaction is running; a call in this state comes from one of its callbacks
        self.broken = False  # one has failed, and the state is not rebuilt yet

    def repair(self) -> None:
        if self.broken and not self.active:
            self.rebuild()
            self.broken = False

    @abstractmethod
    def rebuild(self) -> None:
        """Rebuild a consistent state from any state. May be interrupted and started again."""


def transaction(change: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorates a method of Transactional. Not a context manager, because Ctrl-C can keep an __exit__ from running."""

    @wraps(change)
    def whole(self: Transactional, /, *args: P.args, **kwargs: P.kwargs) -> R:
        active = self.active
        try:
            self.repair()
            self.active = True
            return change(self, *args, **kwargs)
        except BaseException:
            self.broken = True
            raise
        finally:
            self.active = active
            self.repair()  # also if a callback has swallowed the exception of a nested transaction

    return whole
