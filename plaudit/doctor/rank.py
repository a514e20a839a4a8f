"""One rank of `plaudit doctor`: connects to the others and exchanges data with each, over gloo and on GPUs over NCCL.

`python -m plaudit.doctor.rank` prints its progress on stdout as JSON lines, and finally the findings: rank 0 for all.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit import __version__
from plaudit.doctor.doctor import LOCAL, SECONDS, STORE
from plaudit.doctor.finding import Finding, failed, ok, warning
from plaudit.train.run.ranks import Group

BUFFER = 2**20  # bytes sent to a peer and back
REPEATS = 3
CLOCK_SECONDS = 1.0

Rates = list[tuple[int, int, float]]
"""For every pair (i, j), i < j: bytes per second; 0 if the data returned differs from the data sent."""


def main() -> None:
    _say(stage="started")
    limit = timedelta(seconds=float(os.environ[SECONDS]))
    store = os.environ.get(STORE)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun's store if started by it; otherwise a file of `plaudit doctor`.
    dist.init_process_group("gloo", f"file://{store}" if store else "env://", limit, world, rank)
    _say(stage="joined the others")
    everyone = Group(rank, world, None)
    findings = [*_compare(everyone), *_links(everyone, limit)]
    _say(stage="done", findings=[asdict(each) for each in findings] if rank == 0 else [])
    dist.destroy_process_group()


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _compare(everyone: Group) -> Iterator[Finding]:
    """Compares the ranks' versions and their clocks."""
    local = [Finding(**each) for each in json.loads(os.environ.get(LOCAL, "[]"))]
    versions = f"plaudit {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    answers = everyone.gather_values((socket.gethostname(), versions, local), tuple[str, str, list[Finding]])
    hosts = [host for host, _, _ in answers]
    if other := [rank for rank, (_, version, _) in enumerate(answers) if version != answers[0][1]]:
        named = ", ".join(f"rank {rank} on {hosts[rank]} has {answers[rank][1]}" for rank in other)
        yield failed("ranks", f"rank 0 has {answers[0][1]}; {named}", "install the same versions on all machines")
    for rank, (host, _, findings) in enumerate(answers):
        if rank:
            yield from (replace(each, host=host) for each in findings if each.status != "ok")
    offsets = _clock_offsets(everyone)
    for rank in (rank for rank, offset in enumerate(offsets) if abs(offset) > CLOCK_SECONDS):
        where = f"the clock of rank {rank} on {hosts[rank]} is {offsets[rank]:+.1f} s from that of rank 0"
        yield warning("clock", where, "synchronise the machines (chrony, NTP)")


def _clock_offsets(everyone: Group) -> list[float]:
    """Seconds that each clock is ahead of rank 0's, from the fastest of a few round trips."""
    offsets = [0.0] * everyone.size
    for other in range(1, everyone.size):
        tries = []
        for _ in range(REPEATS):
            if everyone.index == 0:
                sent = time.time()
                theirs = _exchange(torch.zeros(1, dtype=torch.float64), other, first=True)
                answered = time.time()
                tries.append((answered - sent, float(theirs) - (sent + answered) / 2))
            elif everyone.index == other:
                dist.recv(now := torch.zeros(1, dtype=torch.float64), 0)
                dist.send(now.fill_(time.time()), 0)
        if tries:
            offsets[other] = min(tries)[1]
    return everyone.gather_values(offsets, list[float])[0]  # type: ignore[no-any-return]


def _links(everyone: Group, limit: timedelta) -> Iterator[Finding]:
    _say(stage="exchanging by gloo")
    hosts = everyone.gather_values(socket.gethostname(), str)
    pairs = list(combinations(range(everyone.size), 2))
    yield from _judged("gloo", everyone, _measured(everyone, pairs, "cpu", None), hosts)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    with_gpu = [rank for rank, has in enumerate(everyone.gather_values(local < torch.cuda.device_count(), bool)) if has]
    if not with_gpu:
        return
    _say(stage="exchanging by NCCL")
    group = dist.new_group(with_gpu, timeout=limit, backend="nccl")
    rates: Rates = []
    if everyone.index in with_gpu:
        torch.cuda.set_device(local)
        total = torch.ones(BUFFER // 4, device="cuda")
        dist.all_reduce(total, group=group)
        right = bool((total == len(with_gpu)).all())
        rates = _measured(everyone, list(combinations(with_gpu, 2)), "cuda", group)
    else:
        right = True
    wrong = [rank for rank, fine in enumerate(everyone.gather_values(right, bool)) if not fine]
    if wrong:
        yield failed("nccl", f"a sum over all GPUs is wrong on rank {', '.join(map(str, wrong))}", "test these GPUs")
    yield from _judged("nccl", everyone, rates, hosts, of=len(with_gpu))


def _measured(everyone: Group, pairs: Sequence[tuple[int, int]], device: str, group: Any) -> Rates:
    """The rates of the pairs that this rank starts."""
    rates: Rates = []
    for i, j in pairs:
        if everyone.index not in (i, j):
            continue
        sent = torch.arange(BUFFER, device=device).to(torch.uint8)
        best, same = float("inf"), True
        for _ in range(REPEATS):
            begun = time.perf_counter()
            if everyone.index == i:
                back = _exchange(sent, j, first=True, group=group)
                same = same and bool((back == sent).all())
            else:
                _exchange(sent, i, first=False, group=group)
            best = min(best, time.perf_counter() - begun)
        if everyone.index == i:
            rates.append((i, j, 2 * BUFFER / best if same else 0.0))
    return rates


def _exchange(value: Tensor, other: int, *, first: bool, group: Any = None) -> Tensor:
    """Sends `value` to the other rank, which returns what it received; returns that on the first rank."""
    back = torch.zeros_like(value)
    if first:
        dist.send(value, other, group)
        dist.recv(back, other, group)
    else:
        dist.recv(back, other, group)
        dist.send(back, other, group)
    return back


def _judged(check: str, everyone: Group, mine: Rates, hosts: Sequence[str], of: int | None = None) -> Iterator[Finding]:
    rates = [each for answers in everyone.gather_values(mine, list[tuple[int, int, float]]) for each in answers]
    yield from judged(check, rates, hosts, of or everyone.size)


def judged(check: str, rates: Rates, hosts: Sequence[str], ranks: int) -> Iterator[Finding]:
    """Findings from the rates of all pairs: each link is compared with those of its kind, within or between
    machines."""
    where = f"{ranks} rank(s) on {len(set(hosts))} machine(s)"
    if not rates:
        yield ok(check, f"{where}: no other rank to exchange data with")
        return
    interface = f"set {'NCCL' if check == 'nccl' else 'GLOO'}_SOCKET_IFNAME to the fast interface, or check the cable"
    for i, j, rate in rates:
        link = f"between rank {i} on {hosts[i]} and rank {j} on {hosts[j]}"
        peers = [each for a, b, each in rates if (hosts[a] == hosts[b]) == (hosts[i] == hosts[j])]
        if rate == 0:
            yield failed(check, f"{link} corrupts data", "check network cards and memory")
        elif rate < statistics.median(peers) / 2:
            yield warning(
                check, f"{link} {_rate(rate)}, under half of {_rate(statistics.median(peers))} of others", interface
            )
    i, j, slowest = min(rates, key=lambda each: each[2])
    yield ok(check, f"{where}: {len(rates)} pair(s), the slowest {i}-{j} at {_rate(slowest)}")


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


if __name__ == "__main__":
    main()
