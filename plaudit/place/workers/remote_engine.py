"""The trainer's end of one rollout worker: starts it, sends requests, and detects that it has died or was stopped.

    lost -> start() -> stale -> (weights) -> resume() -> serving -> (died, stopped, silent) -> lost

Calls in flight at a lost worker are kept and sent again, whole, once its successor has the weights: the samples depend
on the seeds and the call alone. Samples that the lost worker already sent are discarded, so that none is duplicated.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from plaudit.core import SamplingParams
from plaudit.errors import EngineLost, ReceiverLost, RequestError
from plaudit.place.workers import frames
from plaudit.process.spawn import end_child, spawn
from plaudit.records import Sample

SILENCE_SECONDS = 20.0  # without a heartbeat: the process is stopped or the machine is overloaded; it is replaced
HANG_SECONDS = 600.0  # heartbeats, but no progress on its requests
LOAD_SECONDS = 600.0
ANSWER_SECONDS = 120.0
LOOK_SECONDS = 0.25  # poll interval while nothing arrives
MOST_DEATHS = 3  # consecutive losses without a single sample


class Hosted(Protocol):
    """A worker process as provided by its host: the socket to it, and a way to end it."""

    sock: socket.socket

    def end(self) -> str:
        """Make sure that it has exited; returns how it ended, for messages."""


Host = Callable[[], Hosted]


class OwnProcess:
    """A worker on this machine."""

    def __init__(self) -> None:
        self._process, self.sock = spawn("plaudit.place.workers.worker")
        self.pid = self._process.pid

    def end(self) -> str:
        return end_child(self._process)


@dataclass(eq=False)
class PendingCall:
    """One generation in flight. `samples` by (prompt, index)."""

    id: int
    frame: frames.GenerateCall
    wanted: int
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.done.set()

    def result(self) -> list[Sample]:
        if self.error is not None:
            raise self.error
        return [self.samples[key] for key in sorted(self.samples)]


class RemoteEngine:
    """A channel's Wire, and the engine behind it. `news` is notified of every event that a waiting thread may wait for.

    Any thread may submit; starting, weights and resuming belong to one thread."""

    def __init__(
        self, label: str, start: frames.Start, host: Host = OwnProcess, news: threading.Condition | None = None
    ) -> None:
        self.label = label
        self.name = label
        self.news = threading.Condition() if news is None else news
        self.lost: str | None = "has not been started"
        self.serving = False
        self.restarts = -1
        self.ranks = len(start.devices)
        self._start = start
        self._host = host
        self._hosted: Hosted | None = None
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._calls: dict[int, PendingCall] = {}
        self._ids = count()
        self._weight_replies: deque[dict[str, Any]] = deque()
        self._answers: dict[int, dict[str, Any]] = {}
        self._hello = False
        self._failure_reason: str | None = None  # its own error message, or why it was dropped
        self._deaths = 0
        self._last_sign = self._last_step = time.monotonic()
        self._steps = 0

    # Lifecycle

    def start(self) -> None:
        """A new process, which is stale."""
        self.begin()
        self.loaded()

    def begin(self) -> None:
        """Start it without waiting: several may load at the same time."""
        self._end()
        self.restarts += 1
        if self._deaths >= MOST_DEATHS:
            raise EngineLost(f"{self.label} {self.lost}, {self._deaths} times in a row without a sample")
        self._deaths += 1
        self._hello, self._failure_reason = False, None
        self._weight_replies.clear()
        self._hosted = self._host()
        self.lost = None
        self._last_sign = self._last_step = time.monotonic()
        self._reader = threading.Thread(target=self._read, args=(self._hosted,), name=self.label, daemon=True)
        self._reader.start()
        self._send(self._start)

    def loaded(self) -> None:
        """Wait until it has loaded its model. Raises EngineLost if it reports that it cannot, ReceiverLost if it
        dies."""
        with self.news:
            self.news.wait_for(lambda: self._hello or self.lost is not None, LOAD_SECONDS)
        if self.lost is not None:
            if self._failure_reason is None:
                raise ReceiverLost(self.name, self.lost)
            raise EngineLost(f"{self.label} {self.lost}")
        if not self._hello:
            self._end()
            raise EngineLost(f"{self.label} did not load its model within {LOAD_SECONDS:g} s")

    def resume(self) -> None:
        """It has the weights: waiting calls are sent, and new ones are accepted."""
        with self.news:
            if self.serving or self.lost is not None:
                return
            self.serving = True
            waiting = sorted(self._calls.values(), key=lambda call: call.id)
        for call in waiting:
            self._send(call.frame)

    def drop(self, why: str) -> None:
        """Give up the process: it did not do what was requested."""
        self._failure_reason = why
        self._end()

    def close(self) -> None:
        with self.news:
            for call in self._calls.values():
                call.end(EngineLost(f"{self.label} was closed"))
            self._calls.clear()
        self._end()
        self.lost = "was closed"

    def _end(self) -> None:
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            with suppress(OSError):  # the reader has closed it already
                hosted.sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()  # it ends the process
            self._reader = None

    # Generation

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, hand_over: bool = False,
        begun: list[list[Sample]] | None = None,
    ) -> PendingCall:  # fmt: skip
        """hand_over: samples come with their prompt's KV; release the call when it was imported. begun: as in
        core.Engine.generate, with such KV."""
        with self.news:
            id = next(self._ids)
            lengths = [len(prompt) for prompt in prompts]
            frame = frames.GenerateCall(id, lengths, frames.as_bytes(prompts), list(params), hand_over, begun)
            call = PendingCall(id, frame, sum(each.n for each in params) if begun is None else sum(map(len, begun)))
            if not call.wanted:
                call.end()
                return call
            self._calls[id] = call
            serving = self.serving
        if serving:
            self._send(frame)
        return call

    def cancel(self, call: PendingCall) -> None:
        with self.news:
            if self._calls.pop(call.id, None) is None:
                return
        self._send(frames.Cancel(call.id))

    def release(self, call: PendingCall) -> None:
        """Of a call with hand_over: its KV is no longer needed."""
        self._send(frames.Release(call.id))

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        """As core.Engine.generate. Waits as long as the worker lives, or until it has been restarted."""
        call = self.submit(prompts, params)
        call.done.wait()
        return call.result()

    @property
    def outstanding(self) -> int:
        """Samples that it has still to return."""
        with self.news:
            return sum(call.wanted - len(call.samples) for call in self._calls.values())

    def control(self, what: frames.ControlAction, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        id = next(self._ids)
        self._send(frames.ControlCall(id, what))
        with self.news:
            self.news.wait_for(lambda: id in self._answers or self.lost is not None, seconds)
            if id in self._answers:
                return self._answers.pop(id)
            raise ReceiverLost(self.name, self.lost or f"did not answer within {seconds:g} s")

    # Weights

    def send(self, message: dict[str, Any]) -> None:
        if self.lost is not None:
            raise ReceiverLost(self.name, self.lost)
        self._send(frames.WeightCall(message))

    def answer(self, seconds: float) -> dict[str, Any]:
        with self.news:
            self.news.wait_for(lambda: self._weight_replies or self.lost is not None, seconds)
            if self._weight_replies:
                return self._weight_replies.popleft()
            raise ReceiverLost(self.name, self.lost or f"did not answer within {seconds:.3g} s")

    # The reader

    def _send(self, frame: frames.Frame) -> None:
        hosted = self._hosted
        if hosted is None:
            return
        with suppress(OSError), self._sending:  # the reader sees the same end, and reports it
            hosted.sock.sendall(frames.pack(frame))

    def _read(self, hosted: Hosted) -> None:
        stream = frames.FrameStream()
        poll = select.poll()
        poll.register(hosted.sock, select.POLLIN)
        why: str | None = None
        while True:
            # The clock counts only while no data is waiting to be read: this process may have been the stopped one.
            if not poll.poll(LOOK_SECONDS * 1000):
                silent = time.monotonic() - self._last_sign
                if silent > SILENCE_SECONDS and self._hello:
                    why = f"gave no sign of life for {silent:.0f} s"
                    break
                continue
            if time.monotonic() - self._last_step > HANG_SECONDS:
                why = f"is alive, but made no progress for {HANG_SECONDS:g} s"
                break
            try:
                data = hosted.sock.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                break
            self._last_sign = time.monotonic()
            for frame in stream.feed(data):
                self._take(frame)
        ended = hosted.end()
        hosted.sock.close()
        with self.news:
            self.serving = False
            for call in self._calls.values():
                call.samples.clear()
            self.lost = self._failure_reason or why or ended
            self.news.notify_all()

    def _take(self, frame: frames.Frame) -> None:
        with self.news:
            match frame:
                case frames.Alive():
                    if frame.steps != self._steps or not self._calls:
                        self._steps, self._last_step = frame.steps, time.monotonic()
                    return
                case frames.Hello():
                    self._hello = True
                    self.name = f"{self.label} (pid {frame.pid})"
                case frames.Failed():
                    self._failure_reason = f"failed: {frame.message}"
                case frames.Samples():
                    self._finished(frame)
                case frames.Refused():
                    if (call := self._calls.pop(frame.id, None)) is not None:
                        call.end(RequestError(f"{self.label}: {frame.message}"))
                case frames.WeightCallReply():
                    self._weight_replies.append(frame.message)
                case frames.ControlReply():
                    self._answers[frame.id] = frame.value
                case _:
                    raise ValueError(f"a rollout worker sends no {type(frame).__name__}")
            self.news.notify_all()

    def _finished(self, frame: frames.Samples) -> None:
        call = self._calls.get(frame.id)
        if call is None:  # it was cancelled
            return
        self._deaths = 0
        for sample in frame.samples:
            call.samples[sample.group, sample.index] = sample
        if len(call.samples) == call.wanted:
            del self._calls[frame.id]
            call.end()
