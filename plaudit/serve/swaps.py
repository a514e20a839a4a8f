"""Checks which models may be swapped in, and runs swaps in the background: each loads beside the current model, and its
status can be queried."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plaudit.config.reward import RewardTable, parse_reward
from plaudit.config.serve import NO_SCORE
from plaudit.errors import ConfigError, PlauditError
from plaudit.serve.options import completed
from plaudit.serve.version import Table

KEPT = 50  # swaps that are listed


class ModelRoot:
    """The directory that contains the models that may be swapped in."""

    def __init__(self, path: str | None) -> None:
        self._root = None if path is None else Path(path).resolve()

    def confined(self, path: str) -> Path:
        """Resolves `path` under the root, following links: nothing outside the root is opened."""
        if self._root is None:
            raise ConfigError("the server was started without model_root, so models cannot be swapped")
        if "\0" in path or "://" in path or Path(path).is_absolute():
            raise ConfigError(f"path {path[:100]!r} is not valid; expected a path relative to model_root")
        try:
            directory = (self._root / path).resolve()
            inside = directory.is_relative_to(self._root) and directory.is_dir()
        except (OSError, RuntimeError):  # a name that is too long, or a circular link
            inside = False
        if not inside:
            raise ConfigError(f"path {path[:100]!r} is not a directory under model_root")
        for file in directory.rglob("*"):
            if not file.resolve().is_relative_to(self._root):
                raise ConfigError(
                    f"path {path[:100]!r} contains the link {file.name!r}, which points outside model_root"
                )
        return directory

    def holds(self, path: str) -> Path:
        """Checks an absolute path that was resolved before."""
        if self._root is None or not Path(path).is_relative_to(self._root):
            raise ConfigError(f"the previous model is not under model_root, which is {self._root or 'not set'}")
        return self.confined(str(Path(path).relative_to(self._root)))

    def scrub(self, message: str) -> str:
        """The message without the server's private paths."""
        return message if self._root is None else message.replace(f"{self._root}/", "").replace(str(self._root), ".")


def swapped_table(name: str, kind: str, entry: Mapping[str, Any]) -> Table:
    """The table for a directory as a new server would read it, with the operator's settings for this name. `kind`: of
    the model that is replaced."""
    source = f"models.{name}"
    table: RewardTable = parse_reward(completed(entry, source), source)
    if table.kind in NO_SCORE and kind not in NO_SCORE:
        raise ConfigError(
            f"the new model is of kind {table.kind!r}, which has no scores, but {name} is a {kind} model; add a "
            "reward.toml to its directory, or set kind and format for this name"
        )
    assert isinstance(table, Table)
    return table


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
        """Starts a swap. `load` returns the version, or raises a PlauditError whose message may be shown to clients."""
        status = SwapStatus(next(self._ids), model, path)
        self._last.appendleft(status)
        task = asyncio.create_task(self._run(status, load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return status

    def shown(self) -> list[dict[str, Any]]:
        """Newest first."""
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
            status.state, status.error = "failed", f"{type(error).__name__}; see the server's log"
            raise
        finally:
            status.seconds = time.monotonic() - status.began
