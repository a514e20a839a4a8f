"""The channels with weights on a GPU, between processes that share it."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
import torch

from plaudit.place.channels.channel import Channel
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from tests.place.receiving import Process, Small, digest, publish_and_be_killed, receiving
from tests.place.test_channels import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", ["disk", "collective", "shared", "home"])
def test_received_weights_equal_published_weights(kind: str, tmp_path: Path) -> None:
    module = Small(1).to("cuda")
    channel: Channel = {
        "disk": lambda: DiskChannel(tmp_path / "weights"), "collective": CollectiveChannel,
        "shared": lambda: SharedChannel(checksum=True), "home": lambda: SharedChannel(module),
    }[kind]()  # fmt: skip
    with receiving(count=2, device="cuda") as others:
        for version in (1, 2, 5):
            channel.publish(Weights.of(module), version, [other.wire for other in others])
            for other in others:
                received = other.look()
                assert (received["version"], received["digest"]) == (version, digest(module))
            train(module)
    channel.close()


def test_shared_memory_needs_no_copy_and_keeps_addresses() -> None:
    module = Small(1).to("cuda")
    channel = SharedChannel(module)
    with receiving(device="cuda") as (other,):
        assert channel.publish(Weights.of(module), 1, [other.wire]).extra_bytes == 0
        before = other.look()
        train(module)
        torch.cuda.synchronize()
        assert other.look()["digest"] == digest(module)
        channel.publish(Weights.of(module), 2, [other.wire])
        assert other.look()["addresses"] == before["addresses"]
    channel.close()


def test_a_running_engine_keeps_its_addresses_for_cuda_graphs() -> None:
    module = Small(1).to("cuda")
    channel = SharedChannel()
    with receiving(device="cuda") as (other,):
        before = other.look()["addresses"]
        for version in (1, 2):
            channel.publish(Weights.of(module), version, [other.wire])
            train(module)
        assert other.look()["addresses"] == before
        assert other.look()["digest"] != digest(module)
    channel.close()


def test_a_killed_engine_leaves_no_shared_memory_and_can_be_replaced() -> None:
    module = Small(1).to("cuda")
    channel = SharedChannel(module)
    with receiving(device="cuda") as (other,):
        channel.publish(Weights.of(module), 1, [other.wire])
        other.process.kill()
        assert other.process.wait() == -signal.SIGKILL
    with receiving(device="cuda") as (replacement,):
        channel.publish(Weights.of(module), 1, [replacement.wire])
        assert replacement.look()["digest"] == digest(module)
        assert not [path for path in replacement.look()["shared"] if path.startswith("/dev/shm") and "torch_" in path]
    channel.close()


def test_an_engine_accepts_a_new_trainer_after_the_first_is_killed() -> None:
    module = Small(2).to("cuda")
    with receiving(device="cuda") as (other,):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            trainer = Process(publish_and_be_killed, other.wire.connection, theirs, "cuda")
            ours.settimeout(120.0)
            ours.recv(100)
            assert trainer.wait() == -signal.SIGKILL
        channel = SharedChannel(module)
        channel.publish(Weights.of(module), 0, [other.wire])
        assert other.look()["digest"] == digest(module)
        channel.close()
