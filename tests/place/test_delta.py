"""Weights sent as deltas: few bytes, and bit-identical weights in the engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plaudit.config.supervised import TrainTable
from plaudit.errors import ConfigError, WeightsRefused
from plaudit.models import new_llama
from plaudit.place.channels.channel import Channel, answered
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.delta import DeltaChannel, changes
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.packing import BITS, HEADER, as_bits, pack, unpack
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.weights import Entry, Weights
from plaudit.place.channels.wire import SocketWire, serve_wire
from plaudit.train.optim.optimizer import Optimizer
from tests.train.rl_world import recipe


def unpacked(packed: Tensor, old: Tensor) -> Tensor:
    new = old.clone()
    bits = as_bits(new)
    entry = Entry("x", str(old.dtype).removeprefix("torch."), tuple(old.shape))
    for places, numbers, add in unpack(packed, entry):
        bits[places] = bits[places] + numbers if add else numbers
    return new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.int8])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.2])
def test_unpacked_deltas_reproduce_the_new_weights(dtype: torch.dtype, share: float) -> None:
    torch.manual_seed(1)
    old = (torch.randn(300, 500) * 40).to(dtype)
    new = torch.where(torch.rand(old.shape) < share, (torch.randn(old.shape) * 40).to(dtype), old)
    packed = pack(new, old)
    assert packed is not None
    if share == 0:
        assert not len(packed), "nothing to send"
    else:
        assert torch.equal(as_bits(unpacked(packed, old)), as_bits(new))


def test_deltas_compare_bits_not_values() -> None:
    """-0 differs from 0, NaN equals itself, some values change to an adjacent one, and changes are far apart."""
    old = torch.zeros(1 << 20, dtype=torch.bfloat16)
    old[5], old[600_000], old[7] = torch.nan, 1.0, -1.0
    new = old.clone()
    new[0], new[600_000], new[-1], new[7] = -0.0, 1.0078125, torch.nan, -1.0078125
    packed = pack(new, old)
    assert packed is not None
    assert len(packed) < HEADER + 200
    assert torch.equal(as_bits(unpacked(packed, old)), as_bits(new))


def test_a_delta_that_would_not_be_smaller_is_not_packed() -> None:
    assert pack(torch.randn(1000), torch.randn(1000)) is None
    assert pack(torch.tensor([1.0]), torch.tensor([2.0])) is None
    assert set(BITS) == {1, 2, 4, 8}


@contextmanager
def receiving(module: nn.Module) -> Iterator[tuple[WeightReceiver, SocketWire]]:
    ours, theirs = socket.socketpair()
    receiver = WeightReceiver(module)
    thread = threading.Thread(target=serve_wire, args=(theirs, lambda message: answered(receiver, message)))
    thread.start()
    try:
        yield receiver, SocketWire("engine 0", ours)
    finally:
        ours.close()
        thread.join()
        theirs.close()


def half(seed: int) -> nn.Module:
    return new_llama(
        "policy", vocab_size=512, hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=256,
        max_positions=64, seed=seed,
    ).bfloat16()  # fmt: skip


@pytest.mark.parametrize("kind", ["disk", "collective"])
def test_a_small_step_sends_at_most_5_percent_of_the_bytes_and_matches_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Three optimizer steps at learning rate 1e-6, on a bfloat16 model with a gradient for every weight."""

    def new(name: str) -> Channel:
        return DiskChannel(tmp_path / name, seconds=60) if kind == "disk" else CollectiveChannel(seconds=60)

    trainer, engine = half(1), half(2)
    optimizer = Optimizer(trainer, TrainTable(steps=3, lr=1e-6, warmup=0))
    channel = DeltaChannel(new("whole"), new("changes"))
    with receiving(engine) as (receiver, wire):
        shares = []
        for version in range(1, 5):
            shares.append(channel.publish(Weights.of(trainer), version, [wire]).share)
            assert receiver.version == version
            there = Weights.of(engine).tensors
            for name, tensor in Weights.of(trainer).tensors.items():
                assert torch.equal(as_bits(there[name]), as_bits(tensor))
            optimizer.zero()
            for name, master in optimizer.masters.items():
                master.grad = torch.randn(master.shape, generator=torch.Generator().manual_seed(version + len(name)))
            optimizer.step(1)
        assert shares[0] == 1
        assert all(0 < share <= 0.05 for share in shares[1:]), shares
        wire.name = "engine 0, another process"
        assert channel.publish(Weights.of(trainer), 5, [wire]).share == 1, "who had nothing before gets all"
        later = changes(Weights.of(trainer), {n: t.clone() for n, t in Weights.of(half(3)).tensors.items()}, since=4)
        with pytest.raises(WeightsRefused, match=r"changes since version 4 .* an engine that has version 5"):
            channel.changes.publish(later, 6, [wire])
    channel.close()


@pytest.mark.parametrize("placement", [{"name": "colocated"}, {"name": "disaggregated", "channel": "shared"}])
def test_delta_is_rejected_where_weights_are_shared(placement: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"placement\.delta sends changed weights"):
        recipe(placement={**placement, "delta": True})
