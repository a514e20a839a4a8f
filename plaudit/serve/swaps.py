"""Swaps that nobody waits for: each is asked for, loads beside what serves, and can be looked at meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from plaudit.errors import PlauditError

KEPT = 50  # swaps that are shown


@dataclass(slots=True)
class SwapStatus:
    id: int
    model: str
    path: str
    state: Literal["loading", "done", "failed"] = "loading"
    version: str | None = None
    error: str | None = None
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic, repr=False)

    def shown(self) -> dict[str, Any]:
        seconds = self.seconds or time.monotonic() - self.began
        return {
            "id": self.id, "model": self.model, "path": self.path, "state": self.state, "version": self.version,
            "error": self.error, "seconds": round(seconds, 2),
        }  # fmt: skip


class Swaps:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._last: deque[SwapStatus] = deque(maxlen=KEPT)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, model: str, path: str, load: Coroutine[Any, Any, str]) -> SwapStatus:
        """`load` gives the version, or raises a PlauditError whose message may be shown."""
        status = SwapStatus(next(self._ids), model, path)
        self._last.appendleft(status)
        task = asyncio.create_task(self._run(status, load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return status

    def shown(self) -> list[dict[str, Any]]:
        """The newest first."""
        return [status.shown() for status in self._last]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @staticmethod
    async def _run(status: SwapStatus, load: Coroutine[Any, Any, str]) -> None:
        try:
            status.version = await load
            status.state = "done"
        except PlauditError as error:
            status.state, status.error = "failed", str(error)
        except BaseException as error:
            status.state, status.error = "failed", f"{type(error).__name__}; the server's log has it"
            raise
        finally:
            status.seconds = time.monotonic() - status.began
