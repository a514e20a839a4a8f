"""Continuous batching of policy turns: a turn joins the engine's running batch when it is ready.

One thread, the owner, drives: it processes posted calls, computes a step, and returns the finished turns.
Any thread may submit, cancel and post.

    with new_driver(engine) as driver:
        driver.submit(token_ids, params, done)   # done(sample), between two steps
        while working:
            driver.wait(seconds)
            driver.advance()
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, runtime_checkable

from plaudit.core import Engine, SamplingParams
from plaudit.core.sequence import Update
from plaudit.errors import Aborted, RequestError
from plaudit.records import Sample
from plaudit.train.rollouts.rollouts import Generator

LOOK_SECONDS = 1.0  # between two checks of a waiting owner for an engine to restart


@runtime_checkable
class Mendable(Protocol):
    def restart_lost(self) -> None:
        """Restart engines that running calls wait for; does nothing in a thread that must not."""


@dataclass(eq=False)
class PendingTurn:
    """done   called by the owner, once: with the sample or an error
    heard  called by the owner with each update before that; not called for an engine of another process
    """

    context: list[int]
    params: SamplingParams
    done: Callable[[Sample | Exception], None]
    heard: Callable[[Update], None] | None = None


class TurnDriver(ABC):
    """Closing it leaves nothing in the engine: unfinished turns get an error."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: dict[PendingTurn, None] = {}
        self._closed = False

    # From any thread

    def submit(
        self, context: list[int], params: SamplingParams, done: Callable[[Sample | Exception], None],
        heard: Callable[[Update], None] | None = None,
    ) -> PendingTurn:  # fmt: skip
        if params.n != 1:
            raise RequestError(f"a turn is one sample, and n is {params.n}: submit each separately")
        turn = PendingTurn(context, params, done, heard)
        with self._news:
            if self._closed:
                raise Aborted("the rollout that this turn belongs to has ended")
            self._open[turn] = None
        self.post(lambda: self._begin(turn))
        return turn

    def cancel(self, turn: PendingTurn) -> None:
        """Cancel a turn without calling `done`. A finished turn is unaffected."""
        self.post(lambda: self._cancel(turn))

    def post(self, action: Callable[[], None]) -> None:
        """Let the owner call this between two steps."""
        with self._news:
            self._inbox.append(action)
            self._news.notify_all()

    @property
    def generating(self) -> bool:
        """Whether a turn is in progress."""
        return bool(self._open)

    # The owner's

    def wait(self, seconds: float) -> None:
        """Wait until there is something to do, at most so many seconds."""
        with self._news:
            self._news.wait_for(lambda: self._inbox, seconds)

    def advance(self) -> None:
        """Process what was posted so far, and compute a step of the engine."""
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()

    def close(self) -> None:
        with self._news:
            self._closed = True
        left, self._open = self._open, {}
        self._clear()
        for turn in left:
            with suppress(Exception):  # a callback's error must not stop the others
                turn.done(Aborted("the rollout that this turn belongs to has ended"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, turn: PendingTurn, result: Sample | Exception) -> None:
        if turn in self._open:  # else it was cancelled
            del self._open[turn]
            turn.done(result)

    @abstractmethod
    def _begin(self, turn: PendingTurn) -> None: ...

    @abstractmethod
    def _cancel(self, turn: PendingTurn) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...


class CoreDriver(TurnDriver):
    """The engine of this process: requests are added between its steps."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._others = engine.open_requests
        self._turns: dict[int, PendingTurn] = {}

    def wait(self, seconds: float) -> None:
        if not self._turns:
            super().wait(seconds)

    def advance(self) -> None:
        super().advance()
        if not self._turns:
            return
        self.engine.check_ready()
        for update in self.engine.step():
            if (turn := self._turns.get(update.request)) is None:
                continue
            if update.sample is not None:
                del self._turns[update.request]
                self._finish(turn, update.sample)
            elif turn.heard is not None and turn in self._open:
                turn.heard(update)
        if self.engine.failure is not None:
            raise self.engine.failure

    def _begin(self, turn: PendingTurn) -> None:
        if turn not in self._open:
            return
        try:
            if turn.heard is None:
                (number,) = self.engine.submit_all([turn.context], turn.params)
            else:
                number = self.engine.submit(turn.context, turn.params)
        except RequestError as error:
            self._finish(turn, error)
        else:
            self._turns[number] = turn

    def _cancel(self, turn: PendingTurn) -> None:
        self._open.pop(turn, None)
        numbers = [number for number, each in self._turns.items() if each is turn]
        self.engine.discard(numbers)
        for number in numbers:
            del self._turns[number]

    def _clear(self) -> None:
        self._turns.clear()
        # Not those of `_turns`: Ctrl-C may have arrived between adding to the engine and adding here.
        self.engine.discard(self.engine.open_requests - self._others)


class CallDriver(TurnDriver):
    """Engines of other processes: a turn is one call of `generate`, in a thread, and they batch concurrent calls. A
    call that is no longer needed ends by itself, at the latest with its `max_tokens`.

    together   turns that start together are one call, and end together: batches do not depend on timing
    """

    def __init__(self, engine: Generator, together: bool = False) -> None:
        super().__init__()
        self.engine = engine
        self.together = together
        self._new: list[PendingTurn] = []

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._inbox and (left := until - time.monotonic()) > 0:
            super().wait(min(left, LOOK_SECONDS))
            if isinstance(self.engine, Mendable):
                self.engine.restart_lost()

    def advance(self) -> None:
        super().advance()
        new, self._new = self._new, []
        for turns in [new] if self.together and new else [[turn] for turn in new]:
            threading.Thread(target=self._generate, args=(turns,), daemon=True, name="turn").start()

    def _begin(self, turn: PendingTurn) -> None:
        self._new.append(turn)

    def _generate(self, turns: list[PendingTurn]) -> None:
        results: dict[PendingTurn, Sample | Exception]
        try:
            samples = self.engine.generate([turn.context for turn in turns], [turn.params for turn in turns])
            results = dict(zip(turns, samples, strict=True))
        except Exception as error:
            results = dict.fromkeys(turns, error)
        for turn, result in results.items():
            self.post(partial(self._finish, turn, result))

    def _cancel(self, turn: PendingTurn) -> None:
        self._open.pop(turn, None)

    def _clear(self) -> None: ...


def new_driver(engine: Generator, together: bool = False) -> TurnDriver:
    return CoreDriver(engine) if isinstance(engine, Engine) else CallDriver(engine, together)
