"""`plaudit bench weights`: transfers one model through every channel of this machine, between two processes.

Each channel has its own limit, measured in the same run and alternating with it, so that load affects both:

        disk                  the same bytes written to a new file in the same directory and read again, with as few
                              syncs; the previous file is deleted only afterwards, as for any atomic replacement
        collective            the same bytes broadcast by gloo between the same two processes, from one buffer to
                              another
        shared                the same bytes copied once in memory
        shared, paused        a message round trip: no bytes are moved

The fastest of all repetitions counts, of channel and limit alike. Every transfer is verified: the receiver's weights
equal the trainer's.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from plaudit import __version__
from plaudit.bench.shape import LlamaShaped
from plaudit.bench.weight_receiver import SECONDS, broadcast, checksum_of
from plaudit.errors import ConfigError, WeightsRefused
from plaudit.place.channels.channel import Channel
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.group import ChannelGroup, Rendezvous
from plaudit.place.channels.messages import plain
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from plaudit.place.channels.wire import SocketWire
from plaudit.train.run.checksum import memory_of

PIECES = (4 << 20, 32 << 20, 1 << 40)  # chunk sizes of raw broadcasts; the fastest is the limit


@dataclass(frozen=True, slots=True)
class Row:
    """gb_per_s and share are None if no bytes are moved."""

    channel: str
    seconds: float
    gb_per_s: float | None
    limit: str
    limit_seconds: float
    share: float | None
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsResult:
    """load   runnable processes before the start: with any, the figures are worse than the machine's capability"""

    date: str
    plaudit: str
    commit: str | None
    machine: str
    device: str
    python: str
    torch: str
    parameters: int
    bytes: int
    dtype: str
    repeats: int
    load: float
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_weights(
    parameters: int, *, device: str, dtype: str, directory: Path | None = None, repeats: int = 5
) -> WeightsResult:
    """directory   for the disk channel; None: the directory of temporary files"""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch sees no GPU: use device = 'cpu'")
    load = os.getloadavg()[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # like the receiver: one core for the trainer and one for the engine
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix="plaudit-bench-") as scratch:
            module = LlamaShaped(parameters, getattr(torch, dtype), place)
            rows = [
                _measured(name, make, limit, module, dtype, repeats)
                for name, make, limit in _channels(module, Path(scratch))
            ]
    finally:
        torch.set_num_threads(threads)
    weights = Weights.of(module)
    return WeightsResult(
        datetime.now(UTC).isoformat(timespec="seconds"), __version__, _commit(), _machine(), _named(place),
        platform.python_version(), torch.__version__, sum(t.numel() for t in weights.tensors.values()), weights.nbytes,
        dtype, repeats, round(load, 2), rows,
    )  # fmt: skip


Limit = Callable[["_Other", int], tuple[str, Callable[[], float]]]


def _channels(module: LlamaShaped, scratch: Path) -> Iterator[tuple[str, Callable[[], Channel], Limit]]:
    yield "disk", lambda: DiskChannel(scratch / "weights"), lambda other, size: _disk_limit(scratch, size)
    yield "collective, gloo", lambda: CollectiveChannel(), _gloo_limit
    if torch.cuda.device_count() > 1:
        yield "collective, nccl", lambda: CollectiveChannel("nccl"), _copy_limit(module)
    yield "shared, running", lambda: SharedChannel(), _copy_limit(module)
    # Last, because the module stays in the shared segment.
    yield "shared, paused", lambda: SharedChannel(module), lambda other, size: ("message", other.round_trip)


def _measured(
    name: str, make: Callable[[], Channel], limit: Limit, module: LlamaShaped, dtype: str, repeats: int
) -> Row:
    weights = Weights.of(module)
    device = str(next(module.parameters()).device)
    if name == "collective, nccl":
        device = "cuda:1"
    with _other(module.requested_parameters, dtype, device) as other:
        channel = make()
        try:
            called, measure = limit(other, weights.nbytes)
            limits, seconds, extra = [], [], 0
            for version in range(repeats + 1):
                _change(module, version)
                limits.append(measure())
                published = channel.publish(Weights.of(module), version, [other.wire])
                other.check(module)
                if version:  # the first transfer connects, maps and allocates
                    seconds.append(published.seconds)
                extra = max(extra, published.extra_bytes)
        finally:
            channel.close()
    moved = name != "shared, paused"
    best, bound = min(seconds), min(limits)
    rate = weights.nbytes / best / 1e9 if moved else None
    return Row(name, best, rate, called, bound, bound / best if moved else None, extra)


@torch.no_grad()
def _change(module: LlamaShaped, version: int) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.fill_(version + number / 128)


class _Other:
    """The receiving process."""

    def __init__(self, wire: SocketWire) -> None:
        self.wire = wire

    def call(self, **message: Any) -> dict[str, Any]:
        self.wire.send(message)
        return self.wire.answer(SECONDS)

    def round_trip(self) -> float:
        begun = time.perf_counter()
        self.call(bench="echo")
        return time.perf_counter() - begun

    def check(self, module: LlamaShaped) -> None:
        actual, expected = self.call(bench="sum")["checksum"], checksum_of(module)
        if actual != expected:
            raise WeightsRefused(f"{self.wire.name} has weights of checksum {actual}, published was {expected}")


@contextmanager
def _other(parameters: int, dtype: str, device: str) -> Iterator[_Other]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "plaudit.bench.weight_receiver",
                    str(theirs.fileno()), str(parameters), dtype, device,
                ],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        other = _Other(SocketWire(f"receiver (pid {process.pid})", ours, process))
        try:
            other.round_trip()
            yield other
        finally:
            process.kill()
            process.wait()


def _disk_limit(scratch: Path, size: int) -> tuple[str, Callable[[], float]]:
    data = torch.ones(size, dtype=torch.uint8)
    paths = [scratch / "limit-0", scratch / "limit-1"]

    def measure() -> float:
        path = paths[0]
        paths.reverse()
        begun = time.perf_counter()
        memory = memory_of(data)
        with path.open("wb", buffering=0) as file:
            done = 0
            while done < size:
                done += file.write(memory[done:])
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < size:
                done += file.readinto(memory[done:])
        seconds = time.perf_counter() - begun
        paths[0].unlink(missing_ok=True)
        return seconds

    return "write and read", measure


def _gloo_limit(other: _Other, size: int) -> tuple[str, Callable[[], float]]:
    flat = torch.ones(size, dtype=torch.uint8)
    meeting = Rendezvous("127.0.0.1", SECONDS)
    invitation = meeting.invitation("gloo", 2)
    other.wire.send({"bench": "join", "join": plain(invitation), "bytes": size})
    group = ChannelGroup(invitation, 0, SECONDS, meeting.store)
    other.wire.answer(SECONDS)

    def once(piece: int) -> float:
        other.wire.send({"bench": "broadcast", "piece": piece})
        begun = time.perf_counter()
        broadcast(group, flat, piece)
        other.wire.answer(SECONDS)
        return time.perf_counter() - begun

    return "gloo broadcast", lambda: min(once(piece) for piece in PIECES)


def _copy_limit(module: LlamaShaped) -> Limit:
    def limit(other: _Other, size: int) -> tuple[str, Callable[[], float]]:
        device = next(module.parameters()).device
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

        def measure() -> float:
            begun = time.perf_counter()
            target.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begun

        return "memory copy", measure

    return limit


def _machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} threads"


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _commit() -> str | None:
    """The commit of the checkout this package is run from, if it is one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or None
