"""The HTTP process's side of a critic: its worker, the calls in progress, and its last reported state.

All calls go to one worker in order, one at a time: values requested during an update are those after it. If the worker
crashes, calls in progress are answered with an error and another worker starts from the last save. If there were
updates since that save, they are lost: requests are rejected until somebody loads a save explicitly.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from plaudit.config.critic import CriticServerTable
from plaudit.serve.http.app import Admission
from plaudit.serve.http.message import HttpError, Request
from plaudit.serve.logs import Log
from plaudit.serve.metrics import CriticGauges, Metrics
from plaudit.serve.protocols.critic.wire import TrainingRows
from plaudit.serve.protocols.triton.wire import Rows
from plaudit.serve.workers import frames
from plaudit.serve.workers.link import KILL_SECONDS, SILENCE_SECONDS, Link

NAME = "critic"
# Error types of the worker, and their HTTP status. None of these has changed the weights.
STATUS = {"refused": 422, "not_finite": 422, "conflict": 409, "unknown_save": 404}


class State(msgspec.Struct):
    """The worker's state, sent with every answer.

    updates  made since the critic was created
    save     the newest saved state that this one is based on; None: the model it was started with
    saved    the number of updates in that state
    """

    updates: int
    save: str | None
    saved: int


class CriticInfo(msgspec.Struct):
    """Facts that do not change during a critic's lifetime."""

    vocabulary: int
    positions: int
    parameters: int
    rewards: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """blocks  arrays of two dimensions, in the order defined by the frame"""

    blocks: list[np.ndarray]
    text: str


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Answer]
    trains: bool
    blocks: list[np.ndarray] = field(default_factory=list)


class CriticHost:
    def __init__(
        self, table: CriticServerTable, module: str, admission: Admission, metrics: Metrics, log: Log
    ) -> None:  # fmt: skip
        """`module` is run as the worker process."""
        self.table = table
        self.changed = asyncio.Event()
        self.metrics = metrics
        self.admission = admission
        self.state = State(0, None, 0)
        self.facts: CriticInfo | None = None
        self.lost = 0
        self._log = log
        self._shown = ""
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._gauges = CriticGauges(metrics.registry)
        self.link = Link(
            NAME, table.model_dump(exclude_none=True), self, _environment(), table.limits.load_seconds, module
        )

    async def open(self) -> None:
        hello = await self.link.loaded()
        self.facts = msgspec.convert(hello.facts["facts"], CriticInfo)
        self._take(msgspec.convert(hello.facts["state"], State))

    # Calls

    async def evaluate(self, rows: Rows, request: Request) -> tuple[list[np.ndarray], np.ndarray | None]:
        """The values of every token of each row; and the rewards of the rows, if the server has a reward model."""
        tokens = rows.tokens or []
        self._check(tokens)
        frame = frames.Evaluate(0, [len(row) for row in tokens], frames.as_bytes(tokens), rows.sentences, rows.add_end)
        size = sum(frame.lengths) or sum(len(text) // 4 + 1 for text in rows.sentences or ())
        answer = await self._call(frame, request, size)
        ends = np.cumsum(msgspec.json.decode(answer.text, type=list[int]))
        values = np.split(answer.blocks[0][:, 0], ends[:-1])
        return values, answer.blocks[1] if len(answer.blocks) > 1 else None

    async def learn(self, lesson: TrainingRows, request: Request) -> dict[str, float]:
        """`value/loss` and the other metrics of the update; `updates` includes this one."""
        self._check(lesson.tokens)
        lengths = [len(row) for row in lesson.tokens]
        frame = frames.Learn(
            0, lengths, frames.as_bytes(lesson.tokens), lesson.prompts, lesson.mask.tobytes(), lesson.returns.tobytes(),
            lesson.values.tobytes(), lesson.update_id, lesson.updates,
        )  # fmt: skip
        answer = await self._call(frame, request, sum(lengths))
        metrics: dict[str, float] = msgspec.json.decode(answer.text, type=dict[str, int | float])
        self._gauges.loss.set(metrics["value/loss"])
        return metrics

    async def save(self, request: Request) -> State:
        saved = msgspec.json.decode((await self._call(frames.Keep(0), request, 1)).text, type=State)
        self._log("saved", save=saved.save, updates=saved.updates)
        return saved

    async def load(self, name: str, request: Request) -> None:
        """Load a save; this also makes a critic available again that has lost updates."""
        await self._call(frames.Keep(0, name), request, 1, lost_too=True)
        self.lost = 0
        self._log("loaded", save=name, updates=self.state.updates)
        self.on_change()

    async def _call(
        self, frame: frames.Evaluate | frames.Learn | frames.Keep, request: Request, tokens: int, *,
        lost_too: bool = False,
    ) -> Answer:  # fmt: skip
        if self.link.state != "ready":
            raise HttpError(503, "not_ready", f"the critic: {self.link.public_reason}", retry_after=1)
        if self.lost and not lost_too:
            raise HttpError(409, "state_lost", self._lost_reason())
        request.model, request.tokens = "critic", request.tokens + tokens
        with self.admission.tokens(request.tenant, tokens):
            id = frame.id = next(self._ids)
            call = _Call(asyncio.get_running_loop().create_future(), isinstance(frame, frames.Learn))
            self._calls[id] = call
            self.link.send(frame)
            try:
                async with asyncio.timeout(request.deadline - time.monotonic()):
                    return await call.future
            except TimeoutError:
                raise HttpError(504, "deadline", f"the deadline expired, {self._under_way(frame)}") from None
            finally:
                # An update that has been sent is made even if its caller disconnects: a retry is answered by its id.
                if self._calls.pop(id, None) is not None and self.link.state == "ready":
                    self.link.send(frames.Cancel([id]))

    @staticmethod
    def _under_way(frame: frames.Frame) -> str:
        if isinstance(frame, frames.Learn):
            return "but the update may still be made: retry with the same update_id"
        return f"with {type(frame).__name__} queued or in progress"

    def _check(self, rows: Sequence[Sequence[int]]) -> None:
        if self.facts is None:
            raise HttpError(503, "not_ready", f"the critic: {self.link.public_reason}", retry_after=1)
        for at, row in enumerate(rows):
            if len(row) > self.facts.positions:
                raise HttpError(
                    400,
                    "too_long",
                    f"tokens[{at}] has {len(row)} tokens; the limit of the critic is {self.facts.positions}",
                )
            wrong = next((t for t in (min(row), max(row)) if not 0 <= t < self.facts.vocabulary), None)
            if wrong is not None:
                raise HttpError(
                    400, "bad_tokens", f"tokens[{at}] has the id {wrong}; the vocabulary has {self.facts.vocabulary}"
                )

    # The worker

    def on_results(self, results: frames.Results) -> None:
        values = np.frombuffer(results.values, dtype="<f4")
        at = 0
        for id, rows, columns in zip(results.ids, results.rows, results.columns, strict=True):
            if id in self._calls:
                self._calls[id].blocks.append(values[at : at + rows * columns].reshape(rows, columns))
            at += rows * columns
        for id, type, message in results.errors:
            self._fail(id, HttpError(STATUS.get(type, 500), type, message))
        for id, text in results.texts:
            if id == 0:
                self._take(msgspec.json.decode(text, type=State))
            elif (call := self._calls.pop(id, None)) is not None and not call.future.done():
                call.future.set_result(Answer(call.blocks, text))

    def on_death(self) -> bool:
        lost = self.state.updates - self.state.saved
        if lost:
            self.lost = lost
        if self.facts is not None:  # from now on only the state on disk counts
            self.link.table["start"] = self.state.save or ""
        self.state = State(self.state.saved, self.state.save, self.state.saved)
        for id, call in list(self._calls.items()):
            what = "the update was not made" if call.trains else "nothing was computed"
            self._fail(id, HttpError(503, "worker_died", f"the critic's worker crashed: {what}", retry_after=1))
        self.metrics.restarts.labels(NAME).inc()
        return False

    def on_change(self) -> None:
        status = f"{self.link.state} {self.link.reason} {self.lost}"
        if status != self._shown:
            self._shown = status
            self._log("critic", state=self.link.state, reason=self.link.reason, updates_lost=self.lost)
        self.changed.set()

    def _take(self, state: State) -> None:
        self.state = state
        self._gauges.updates.set(state.updates)

    def _fail(self, id: int, error: HttpError) -> None:
        call = self._calls.pop(id, None)
        if call is not None and not call.future.done():
            call.future.set_exception(error)

    def _lost_reason(self) -> str:
        where = "the model it was started with" if self.state.save is None else f"save {self.state.save!r}"
        return (
            f"the critic's worker crashed, and {self.lost} unsaved updates are lost: load a "
            f"save (POST /v1/critic/load), or restart the server to continue from {where}"
        )

    # The server

    async def unready(self) -> list[str]:
        if self.admission.leaving:
            return ["the server is shutting down"]
        if self.link.state != "ready" or self.facts is None:
            return [f"{NAME}: {self.link.public_reason}"]
        if self.link.silent_for() > SILENCE_SECONDS:
            return [f"{NAME}: its worker has sent nothing for {self.link.silent_for():.0f} s"]
        return [self._lost_reason()] if self.lost else []

    def describe(self) -> list[dict[str, Any]]:
        state = msgspec.to_builtins(self.state)
        facts = {} if self.facts is None else msgspec.to_builtins(self.facts)
        return [
            {
                "name": NAME, "kind": "critic", "state": self.link.state, "reason": self.link.public_reason,
                "restarts": self.link.restarts, **state, "updates_lost": self.lost, **facts,
                "clip": self.table.clip, "lr": self.table.lr,
            }
        ]  # fmt: skip

    def failed(self) -> list[str]:
        return [f"{NAME}: {self.link.reason}"] if self.link.state == "failed" else []

    def recoverable(self) -> bool:
        return self.link.state != "failed"

    def tick(self) -> None:
        if self.link.state == "ready" and self.link.silent_for() > KILL_SECONDS:
            self.link.kill(f"its worker sent no heartbeat for {KILL_SECONDS:g} s")

    def kill(self) -> None:
        self.link.kill()

    async def close(self) -> None:
        if unsaved := self.state.updates - self.state.saved:
            self._log("unsaved", updates=unsaved, save=self.state.save)
        await self.link.close()


def _environment() -> dict[str, str]:
    return {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
