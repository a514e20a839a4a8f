"""Weight channels from a trainer to its engines: the interface, and what all channels share.

A publication is a message to every receiver, the data transfer, and an acknowledgement from every receiver, within one
deadline. Names, shapes, dtypes and the version are checked on both sides. A receiver that is dead or late is named in
a ReceiverLost, raised after the answers of all others have been read, so that their wires have no unread messages.

Versions increase. The same version may be published again, for instance to a restarted engine; a lower one is refused,
unless it comes from another publisher (a restarted trainer).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from plaudit.errors import PlauditError, RankLost, ReceiverLost, WeightsRefused
from plaudit.place.channels.messages import Body, WeightMessage, WeightReply, plain, typed
from plaudit.place.channels.weights import Layout, Weights

DEADLINE = 120.0  # default seconds for one publication


class Wire(Protocol):
    """The control connection from the trainer to one receiver. Messages are answered in order.

    name   for errors: "rollout 0 (pid 4711)"
    ranks  processes behind it, each of which receives the weights: one answer is for all of them
    """

    name: str
    ranks: int

    def send(self, message: dict[str, Any]) -> None:
        """Send plain data that MessagePack can encode; raises ReceiverLost if the other end has disconnected."""

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer; raises ReceiverLost if the other end has disconnected or after `seconds`."""


@dataclass(frozen=True, slots=True)
class Publication:
    """bytes         of the weights, each tensor once
    extra_bytes   memory that the channel used on both sides, beside the trainer's and the engines' own weights
    share         fraction of all weights' bytes that was transferred; less than 1 for changes alone
    """

    version: int
    seconds: float
    bytes: int
    extra_bytes: int
    share: float = 1.0


class Channel(Protocol):
    """The trainer's side: disk, collective, shared."""

    def publish(self, weights: Weights, version: int, wires: Sequence[Wire]) -> Publication:
        """Every receiver among `wires` has the weights when this returns. One that is not among them counts as
        disconnected. A rank that only helps to gather sharded weights has no wires."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side. `version` is None while it is stale: before the first publication, or after a failure that
    left it half written. A stale engine must not generate. No engine step runs between two messages, so the engine
    never sees a mix of versions."""

    version: int | None

    def receive(self, message: WeightMessage) -> WeightReply: ...

    def close(self) -> None: ...


class Target(Protocol):
    """Where the weights go: a module's own tensors, or an engine that takes names and tensors."""

    def check(self, layout: Layout) -> None:
        """Raises WeightsRefused if these are not the weights of this target."""

    def home(self, name: str) -> Tensor | None:
        """The target's own memory of a tensor, if writing there loads it: saves a copy."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy them. A tensor is valid only until the next one is requested."""


@dataclass(frozen=True, slots=True)
class Received:
    """Result of a receive. checksum: None where none was requested."""

    checksum: str | None
    extra_bytes: int


class Publisher:
    """Common to all channels: numbers publications, sends to all receivers, reads all answers."""

    def __init__(self, seconds: float = DEADLINE) -> None:
        self.seconds = seconds
        self.id = secrets.token_hex(8)
        self.version: int | None = None
        self._number = 0

    def begin(self, version: int) -> Exchange:
        if self.version is not None and version < self.version:
            raise WeightsRefused(f"cannot publish version {version} after version {self.version}")
        self.version = version
        self._number += 1
        return Exchange(f"{self.id}-{self._number}", self.id, version, time.monotonic(), self.seconds)


@dataclass(slots=True)
class Exchange:
    """One publication in progress. Late answers to an earlier one are skipped.

    lost   disconnected receivers, by the names of their wires; raised after the others have answered
    """

    id: str
    publisher: str
    version: int
    begun: float
    seconds: float
    lost: dict[str, ReceiverLost] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return max(0.0, self.begun + self.seconds - time.monotonic())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def request(self, wires: Sequence[Wire], layout: Layout, body: Body) -> list[WeightReply]:
        self.send(wires, layout, body)
        return self.answers(wires)

    def send(self, wires: Sequence[Wire], layout: Layout, body: Body) -> None:
        message = plain(WeightMessage(self.id, self.publisher, self.version, layout, body))
        for wire in wires:
            try:
                wire.send(message)
            except ReceiverLost as error:
                self.lost[wire.name] = error

    def answers(self, wires: Sequence[Wire], grace: float = 0.0) -> list[WeightReply]:
        """One from each, in order. All are read before anything is raised; lost receivers come before refusals.

        grace   minimum seconds for each, even after the deadline: to find out which one missed it
        """
        heard, refused = [], []
        for wire in wires:
            if wire.name in self.lost:
                continue
            try:
                answer = self._answer(wire, grace)
            except ReceiverLost as error:
                self.lost[wire.name] = error
                continue
            if answer.error is not None:
                refused.append(f"{wire.name}: {answer.error}")
            heard.append(answer)
        if self.lost:
            raise ReceiverLost.several(list(self.lost.values()))
        if refused:
            raise WeightsRefused("; ".join(refused))
        return heard

    def _answer(self, wire: Wire, grace: float) -> WeightReply:
        until = time.monotonic() + max(self.left, grace)
        while True:
            answer = typed(wire.answer(max(0.0, until - time.monotonic())), WeightReply)
            if answer.exchange == self.id:
                return answer


def check_acknowledged(
    wires: Sequence[Wire], answers: Sequence[WeightReply], version: int, checksum: str | None
) -> None:
    """Check that each has this version, and received what was sent."""
    for wire, answer in zip(wires, answers, strict=True):
        if answer.version != version:
            raise WeightsRefused(f"{wire.name} has version {answer.version}, expected version {version}")
        if answer.checksum != checksum:
            raise WeightsRefused(
                f"{wire.name} has weights with checksum {answer.checksum}, expected {checksum}: they were damaged on "
                "the way; publish again"
            )


def answered(receiver: Receiver, data: dict[str, Any]) -> dict[str, Any]:
    """The receiver's answer to a message, both as a wire transfers them. A refusal is an answer; a bug is not, nor the
    loss of a rank, which ends the engine."""
    message = typed(data, WeightMessage)
    try:
        return plain(receiver.receive(message))
    except RankLost:
        raise
    except PlauditError as error:
        return plain(WeightReply(message.exchange, error=str(error)))
