"""Changes that happen whole or not at all, whatever exception ends them.

Prompts are entered in the tree and copies counted before they are computed, so an exception between (Ctrl-C raises one
anywhere) would leave books that promise what is not there. What changes the books is a `transaction`: after an
exception they are set up again, at once or, if a second one keeps it from that, before the next change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Books(ABC):
    """Whoever has methods that are transactions."""

    def __init__(self) -> None:
        self.inside = False  # a transaction is under way: who asks is one of its callbacks
        self.torn = False  # one has failed, and the books are not yet set up again

    def mend(self) -> None:
        if self.torn and not self.inside:
            self.rebuild()
            self.torn = False

    @abstractmethod
    def rebuild(self) -> None:
        """Set up the books, in whatever state they are. May be broken off and begun again."""


def transaction(change: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """For a method of Books. A function and no context manager: Ctrl-C can keep an __exit__ from running."""

    @wraps(change)
    def whole(self: Books, /, *args: P.args, **kwargs: P.kwargs) -> R:
        inside = self.inside
        try:
            self.mend()
            self.inside = True
            return change(self, *args, **kwargs)
        except BaseException:
            self.torn = True
            raise
        finally:
            self.inside = inside
            self.mend()  # also where a callback has swallowed the exception of a change inside

    return whole
