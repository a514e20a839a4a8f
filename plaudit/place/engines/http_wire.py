"""A weight channel's connection to an HTTP engine: every message is one call, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from plaudit.errors import EngineError, ReceiverLost


class HttpWire:
    """`call` sends a message to the engine and returns its answer; it raises EngineError if the engine is lost."""

    ranks = 1

    def __init__(self, name: str, call: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.name = name
        self._call = call
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any] | EngineError] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, message: dict[str, Any]) -> None:
        if self._thread is None:
            # A daemon: a call that never returns must not keep the trainer from exiting.
            self._thread = threading.Thread(target=self._run, name=f"wire to {self.name}", daemon=True)
            self._thread.start()
        self._messages.put(message)

    def answer(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise ReceiverLost(self.name, f"did not answer within {seconds:.3g} s") from None
        if isinstance(answer, EngineError):
            raise ReceiverLost(self.name, str(answer)) from answer
        return answer

    def _run(self) -> None:
        while True:
            message = self._messages.get()
            try:
                self._answers.put(self._call(message))
            except EngineError as error:
                self._answers.put(error)
