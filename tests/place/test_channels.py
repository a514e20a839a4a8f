"""The guarantees of every weight channel, between real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plaudit.errors import ReceiverLost, WeightsRefused
from plaudit.place.channels.channel import Channel, Publisher
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.messages import DiskTake, WeightMessage, WeightReply, plain, typed
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from tests.place.receiving import Process, Receiving, Small, digest, publish_and_be_killed, publish_sharded, receiving

Make = Callable[..., Channel]
KINDS = ["disk", "collective", "shared", "home"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Channel] = []

    def channel(module: nn.Module, seconds: float = 60.0) -> Channel:
        made.append(
            {
                "disk": lambda: DiskChannel(tmp_path / "weights", seconds=seconds),
                "collective": lambda: CollectiveChannel(seconds=seconds),
                "shared": lambda: SharedChannel(seconds=seconds, checksum=True),
                "home": lambda: SharedChannel(module, seconds=seconds),
            }[kind]()
        )
        return made[-1]

    yield channel
    for one in made:
        one.close()


def train(module: nn.Module) -> None:
    """Changes every value in place, as an optimizer does."""
    with torch.no_grad():
        for tensor in Weights.of(module).tensors.values():
            tensor += 1


@pytest.mark.slow
def test_received_weights_equal_published_weights(make: Make) -> None:
    module = Small(1)
    channel = make(module)
    with receiving() as (other,):
        assert other.look()["version"] is None
        for version in (1, 2, 5):
            published = channel.publish(Weights.of(module), version, [other.wire])
            assert published.version == version
            assert published.bytes == Weights.of(module).nbytes
            received = other.look()
            assert (received["version"], received["digest"]) == (version, digest(module))
            train(module)


def test_ties_may_differ_between_the_sides(make: Make) -> None:
    module = Small(1)
    channel = make(module)
    with receiving(tied="0") as (other,):
        channel.publish(Weights.of(module), 1, [other.wire])
        assert other.look()["digest"] == digest(module)


def test_untied_weights_are_rejected_by_a_tied_engine(make: Make) -> None:
    module = Small(1, tied=False)
    channel = make(module)
    with receiving(tied="1") as (other,), pytest.raises(WeightsRefused, match="one tensor in the engine and two in"):
        channel.publish(Weights.of(module), 1, [other.wire])


def test_a_shape_mismatch_is_rejected_before_anything_is_written(make: Make) -> None:
    module = Small(1, width=641)
    channel = make(module)
    with receiving() as (other,):
        before = other.look()
        with pytest.raises(WeightsRefused, match=r"rollout 0.*'big.weight' is float32 \[480, 640\] in the engine and"):
            channel.publish(Weights.of(module), 1, [other.wire])
        assert other.look() == before


def test_versions_increase_and_a_restarted_engine_gets_the_current_one(make: Make) -> None:
    module = Small(1)
    channel = make(module)
    with receiving(count=2) as (first, second):
        channel.publish(Weights.of(module), 4, [first.wire, second.wire])
        with pytest.raises(WeightsRefused, match="cannot publish version 3 after version 4"):
            channel.publish(Weights.of(module), 3, [first.wire])
        second.process.kill()
        with receiving() as (restarted,):
            assert restarted.look()["version"] is None
            channel.publish(Weights.of(module), 4, [restarted.wire])
            assert restarted.look()["digest"] == first.look()["digest"] == digest(module)
            train(module)
            channel.publish(Weights.of(module), 5, [first.wire, restarted.wire])
            assert restarted.look()["digest"] == first.look()["digest"] == digest(module)


def test_a_dead_receiver_is_named_and_the_others_continue(make: Make) -> None:
    module = Small(1)
    channel = make(module)
    with receiving(count=2) as (one, dead):
        channel.publish(Weights.of(module), 1, [one.wire, dead.wire])
        dead.process.kill()
        with pytest.raises(ReceiverLost, match=r"rollout 1 \(pid \d+\) has ended \(exit code -9\)") as lost:
            channel.publish(Weights.of(module), 2, [one.wire, dead.wire])
        assert lost.value.names == (dead.wire.name,)
        train(module)
        channel.publish(Weights.of(module), 3, [one.wire])
        assert one.look()["digest"] == digest(module)


def test_a_stopped_receiver_is_named_within_the_timeout(make: Make, kind: str) -> None:
    module = Small(1)
    channel = make(module, seconds=5.0)
    with receiving(count=2) as (one, stopped):
        channel.publish(Weights.of(module), 1, [one.wire, stopped.wire])
        os.kill(stopped.process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(ReceiverLost, match=r"rollout 1.*did not answer within") as lost:
            channel.publish(Weights.of(module), 2, [one.wire, stopped.wire])
        assert lost.value.names == (stopped.wire.name,)
        assert time.monotonic() - begun < 30.0  # detects a hang; not a speed limit
        channel.publish(Weights.of(module), 3, [one.wire])
        assert one.look()["version"] == 3


def test_a_new_publisher_may_start_at_a_lower_version(make: Make) -> None:
    module = Small(1)
    with receiving() as (other,):
        make(module).publish(Weights.of(module), 7, [other.wire])
        train(module)
        make(module).publish(Weights.of(module), 0, [other.wire])
        assert (other.look()["version"], other.look()["digest"]) == (0, digest(module))


@pytest.mark.parametrize("kind", ["disk", "collective"], indirect=True)
def test_a_receiver_that_dies_during_a_transfer_is_named(make: Make) -> None:
    module = Small(1)
    channel = make(module, seconds=20.0)
    with receiving(count=2) as (one, dying):
        channel.publish(Weights.of(module), 1, [one.wire, dying.wire])
        dying.die_in_midst()
        with pytest.raises(ReceiverLost, match=r"rollout 1 .*exit code -9"):
            channel.publish(Weights.of(module), 2, [one.wire, dying.wire])
        train(module)
        with receiving() as (replacement,):
            channel.publish(Weights.of(module), 3, [one.wire, replacement.wire])
            assert one.look()["digest"] == replacement.look()["digest"] == digest(module)


@pytest.mark.parametrize("kind", ["disk", "collective"], indirect=True)
def test_a_corrupted_bit_is_detected(make: Make) -> None:
    module = Small(1)
    channel = make(module)
    with receiving() as (other,):
        other.damage()
        with pytest.raises(WeightsRefused, match=r"rollout 0 .* they were damaged on the way; publish again"):
            channel.publish(Weights.of(module), 1, [other.wire])
        channel.publish(Weights.of(module), 2, [other.wire])
        assert other.look()["digest"] == digest(module)


def test_shared_memory_needs_no_copy() -> None:
    module = Small(1)
    channel = SharedChannel(module)
    with receiving() as (other,):
        assert channel.publish(Weights.of(module), 1, [other.wire]).extra_bytes == 0
        before = other.look()
        train(module)
        # Both use the same memory, so the engine sees the trainer's changes before they are published.
        assert other.look()["digest"] == digest(module)
        channel.publish(Weights.of(module), 2, [other.wire])
        assert other.look()["addresses"] == before["addresses"]
    channel.close()


def test_running_engines_keep_their_weights_until_the_next_version_is_published() -> None:
    module = Small(1)
    channel = SharedChannel()
    with receiving() as (other,):
        channel.publish(Weights.of(module), 1, [other.wire])
        first = other.look()
        train(module)
        assert other.look()["digest"] == first["digest"] != digest(module)
        channel.publish(Weights.of(module), 2, [other.wire])
        second = other.look()
        assert second["digest"] == digest(module)
        assert not set(first["addresses"]) & set(second["addresses"]) - {0}
        channel.publish(Weights.of(module), 3, [other.wire])
        assert other.look()["addresses"] == first["addresses"]
    channel.close()


def test_a_module_no_longer_in_shared_memory_is_rejected() -> None:
    module = Small(1)
    channel = SharedChannel(module)
    module.big.weight.data = module.big.weight.data.clone()
    with pytest.raises(WeightsRefused, match=r"'big.weight' is no longer in the shared memory"):
        channel.publish(Weights.of(module), 1, [])
    channel.close()


def test_the_disk_channel_keeps_one_version_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    module = Small(1)
    for leftover in (".spare-of-one-that-was-killed", "version-000009"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_bytes(b"x" * 3_000_000)  # longer than the new file
    channel = DiskChannel(tmp_path)
    with receiving() as (other,):
        for version in (1, 2, 3):
            train(module)
            channel.publish(Weights.of(module), version, [other.wire])
            assert other.look()["digest"] == digest(module)
    channel.close()
    assert [path.name for path in tmp_path.iterdir()] == ["version-000003"]
    stored = load_file(tmp_path / "version-000003" / "model.safetensors")
    assert stored.keys() == Weights.of(module).tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in Weights.of(module))


def test_a_truncated_file_is_rejected_and_leaves_the_engine_without_a_version(tmp_path: Path) -> None:
    module = Small(1)

    class Cutting:
        """A wire whose filesystem shows a partly written file."""

        def __init__(self, other: Receiving, size: int) -> None:
            self.name, self.answer, self._send, self._size = other.wire.name, other.wire.answer, other.wire.send, size

        def send(self, message: dict[str, Any]) -> None:
            os.truncate(Path(message["body"]["path"]) / "model.safetensors", self._size)
            self._send(message)

    channel = DiskChannel(tmp_path)
    with receiving() as (other,):
        channel.publish(Weights.of(module), 1, [other.wire])
        with pytest.raises(WeightsRefused, match=r"ends within 'big.weight'"):
            channel.publish(Weights.of(module), 2, [Cutting(other, 100_000)])
        assert other.look()["version"] is None
        with pytest.raises(WeightsRefused, match="holds other tensors"):
            channel.publish(Weights.of(module), 3, [Cutting(other, 10)])


def test_shared_memory_survives_a_killed_trainer_without_a_named_segment() -> None:
    """Segments have no names: the kernel frees them when the last process that maps them ends."""
    with receiving() as (other,):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            trainer = Process(publish_and_be_killed, other.wire.connection, theirs)
            ours.settimeout(60.0)
            published = ours.recv(100).decode()
        assert trainer.wait() == -signal.SIGKILL
        received = other.look()
        assert received["digest"] == published
        assert received["shared"] == ["/memfd:plaudit-weights (deleted)"]


@pytest.mark.parametrize("kind", ["disk", "collective", "shared"])
def test_sharded_weights_are_gathered_when_published(kind: str, tmp_path: Path) -> None:
    with receiving() as (other,):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ranks = [
                Process(publish_sharded, rank, str(tmp_path), kind, other.wire.connection, theirs) for rank in range(2)
            ]
            assert [rank.wait(60.0) for rank in ranks] == [0, 0]
            published = ours.recv(100).decode()
        assert (other.look()["version"], other.look()["digest"]) == (2, published)


@pytest.mark.slow
def test_the_example_in_the_guide_runs() -> None:
    guide = Path(__file__).parents[2] / "docs" / "channels.md"
    example = guide.read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "1 True 288\n"


class LateWire:
    """A receiver whose answer to an earlier publication arrives late."""

    name = "late"

    def __init__(self, late: list[WeightReply]) -> None:
        self.late = late
        self.sent: list[WeightMessage] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(typed(message, WeightMessage))

    def answer(self, seconds: float) -> dict[str, Any]:
        if self.late:
            return plain(self.late.pop(0))
        last = self.sent[-1]
        return plain(WeightReply(last.exchange, version=last.version, checksum="new"))

    def close(self) -> None: ...


def test_late_answers_to_earlier_publications_are_ignored() -> None:
    publisher = Publisher(seconds=5)
    first = publisher.begin(1)
    late = WeightReply(first.id, version=1, checksum="old")
    wire = LateWire([late, WeightReply("another publisher's-2", version=2, checksum="foreign")])
    (answer,) = publisher.begin(2).request([wire], Weights({}).layout, DiskTake("nowhere"))
    assert (answer.version, answer.checksum) == (2, "new")
