"""The ranks of one model: how they start, load the same weights, and exit together.

Rank 0 is the model's worker. On this machine it starts the others itself, as child processes that exit with it, and
they rendezvous through a file. Under torchrun, on one or several machines, the processes with
another RANK run `subscribe`, which starts a rank for every group that a worker of rank 0 posts in torchrun's store:
when the server starts, when a group is restarted, when another version is swapped in.

    joined    every rank is present, or an error names the missing ones
    loaded    every rank has its shard of the same weights, verified by checksum, or all exit with the same error
    together  gloo transfers messages (and tensors on a CPU), NCCL tensors on GPUs, each with a timeout
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import LogprobsTable, OutcomeTable, ProcessTable, parse_reward
from plaudit.core import Engine
from plaudit.core.device.choose import backend_of
from plaudit.core.device.lockstep import Leader, RankGroups, follow
from plaudit.core.kv.memory import limit_memory
from plaudit.core.model.stages import RankPosition
from plaudit.core.proof.support import inspect
from plaudit.errors import ConfigError, ModelError, PlauditError, RankLost, one_line
from plaudit.models import choose_device
from plaudit.process.framing import FrameReader, pack
from plaudit.process.spawn import Child, spawn
from plaudit.reward.load import load_part, load_worker
from plaudit.reward.work import ModelInfo
from plaudit.serve.workers.torchrun import launched

LOAD_SECONDS = 1800.0  # timeout between the first and the last rank
HEAR_SECONDS = 10.0  # time for the others to receive the error
LOOK_SECONDS = 0.05
GROUPS = "plaudit/groups"
ENDED = "ended"
OWN = "plaudit.serve.workers.ranks"

EngineRead = OutcomeTable | ProcessTable | LogprobsTable
Part = TypeVar("Part")
_lifelines: dict[int, socket.socket] = {}


@dataclass
class RankGroup:
    """One process's rank in the group of a model."""

    rank: int
    store: Store
    table: EngineRead
    local: int
    """The index of its GPU on this machine."""
    children: list[Child] = field(default_factory=list)
    meeting: tempfile.TemporaryDirectory[str] | None = None
    """The directory of the rendezvous file, on one machine."""
    on_loss: Callable[[str], None] | None = None
    """Called by the heartbeat when a rank is lost; the next step raises an error in any case."""

    @property
    def place(self) -> RankPosition:
        return RankPosition(self.rank, self.table.tensor_parallel, self.table.pipeline_parallel)

    @property
    def size(self) -> int:
        return self.place.size

    def join(self) -> None:
        """Wait until every rank has joined."""
        self.store.set(f"joined/{self.rank}", "yes")
        missing = self._wait("joined", self.table.join_seconds)
        if missing:
            raise ModelError(
                f"rank {', '.join(map(str, missing))} of {self.size} did not join within "
                f"{self.table.join_seconds:g} s: check that its node is up and runs the same command"
            )

    @property
    def device(self) -> str:
        device = choose_device(self.table.device)
        if device != "cuda":
            return device
        count = torch.cuda.device_count()
        if self.local >= count:
            raise ConfigError(
                f"rank {self.rank} has local rank {self.local} on a machine with {count} GPU(s): each rank needs "
                'its own GPU; set tensor_parallel or pipeline_parallel to fewer, or device = "cpu"'
            )
        return f"cuda:{self.local}"

    def meet(self, hashes: Mapping[str, str]) -> RankGroups:
        self.store.set(f"loaded/{self.rank}", json.dumps(hashes))
        missing = self._wait("loaded", LOAD_SECONDS)
        if missing:
            raise ModelError(f"rank {missing[0]} of {self.size} did not load the model within {LOAD_SECONDS:g} s")
        reports = [self.store.get(f"loaded/{rank}").decode() for rank in range(self.size)]
        self.store.set(f"heard/{self.rank}", "yes")
        if (wrong := self._failure(reports) or self._difference(reports)) is not None:
            if self.rank == 0:  # the store closes with this process: only after the others have read the error
                with suppress(ModelError):
                    self._wait("heard", HEAR_SECONDS)
            raise ModelError(wrong)
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self.local)
        limit = datetime.timedelta(seconds=self.table.rank_seconds)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo", store=PrefixStore("ranks", self.store), rank=self.rank,
                world_size=self.size, timeout=limit,
            )  # fmt: skip
            place, everyone = self.place, list(range(self.size))
            carrier = "nccl" if cuda else "gloo"
            messages = dist.new_group(everyone, backend="gloo", timeout=limit)
            shares = [dist.new_group(place.peers(n), backend=carrier, timeout=limit) for n in range(place.stages)]
            stages = dist.new_group(everyone, backend=carrier, timeout=limit) if place.stages > 1 else None
            dist.barrier(messages)  # a connected rank may remove the rendezvous file only after all have read it
        except (RuntimeError, ValueError) as error:
            raise RankLost(
                f"rank {self.rank} of {self.size} could not connect to the others: {one_line(error)}"
            ) from error
        return RankGroups(self.rank, self.size, messages, shares[place.stage], self.on_loss, stages, place.last)

    def _failure(self, reports: list[str]) -> str | None:
        failed = (
            f"rank {rank} of {self.size}: {report[1:]}" for rank, report in enumerate(reports) if report[0] == "-"
        )
        return next(failed, None)

    def _difference(self, reports: list[str]) -> str | None:
        """The first difference from rank 0's model files."""
        first, *others = (json.loads(report) for report in reports)
        for rank, hashes in enumerate(others, 1):
            for name, digest in hashes.items():
                if first.get(name) != digest:
                    own = first.get(name, "none")
                    return (
                        f"the ranks have different weights in {self.table.path} ({name}: rank 0 has {own[:12]}, rank "
                        f"{rank} has {digest[:12]}, by SHA-256): copy the same model to every node"
                    )
        return None

    def loaded(self) -> tuple[Engine, ModelInfo, PreTrainedTokenizerFast, str]:
        """Rank 0's engine and its model information, tokenizer and version."""
        return self.led(lambda: load_worker(self.table, self))

    def led(self, load: Callable[[], Part]) -> Part:
        """Loads on rank 0; if that fails, the others are sent the error."""
        try:
            part = load()
        except Exception as error:
            self.fail(error)
            if isinstance(error, RuntimeError) and (why := self._heard()) is not None:
                raise ModelError(why) from error
            raise
        if self.meeting is not None:
            self.meeting.cleanup()  # all ranks have joined
        return part

    def _heard(self) -> str | None:
        """The error another rank reported before it exited; this rank only sees a broken connection."""
        until = time.monotonic() + HEAR_SECONDS
        while time.monotonic() < until:
            keys = [f"loaded/{rank}" for rank in range(self.size)]
            reports = [self.store.get(key).decode() if self.store.check([key]) else "+" for key in keys]
            if (why := self._failure(["+", *reports[1:]])) is not None:
                return why
            time.sleep(LOOK_SECONDS)
        return None

    def fail(self, error: Exception) -> None:
        """Send the error to the other ranks, which wait in the rendezvous."""
        with suppress(RuntimeError):
            self.store.set(f"loaded/{self.rank}", f"-{one_line(error)}")

    def _wait(self, what: str, seconds: float) -> list[int]:
        """Ranks that did not report in time. Raises an error if one has exited."""
        until = time.monotonic() + seconds
        missing = list(range(self.size))
        while True:
            missing = [rank for rank in missing if not self.store.check([f"{what}/{rank}"])]
            if not missing or time.monotonic() > until:
                return missing
            for rank, child in enumerate(self.children, 1):
                if rank in missing and child.poll() is not None and not self.store.check([f"{what}/{rank}"]):
                    raise ModelError(f"rank {rank} of {self.size} exited with code {child.poll()} before it had {what}")
            time.sleep(LOOK_SECONDS)


@contextmanager
def ranked_engine(
    path: str, ranks: int, *, stages: int = 1, device: str = "auto",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Iterator[Engine]:  # fmt: skip
    """An engine in this process for a model with several ranks on this machine, for example for rollouts. Each stage
    has `ranks` ranks. torch.distributed must not be initialised in this process."""
    if dist.is_initialized():
        raise ConfigError("torch.distributed is already initialised in this process: run the engine in its own process")
    table = LogprobsTable(path=path, tensor_parallel=ranks, pipeline_parallel=stages, device=device, dtype=dtype)
    group = lead(table.model_dump(exclude_none=True), table)
    try:
        engine = group.loaded()[0]
        yield engine
        assert isinstance(engine.backend, Leader)
        engine.backend.end()
    finally:
        for child in group.children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
            child.wait()
            _lifelines.pop(child.pid).close()
        if dist.is_initialized():
            dist.destroy_process_group()


def lead(tree: dict[str, Any], table: EngineRead) -> RankGroup:
    """The group in which this process is rank 0, after all ranks have joined."""
    if launched():
        host = os.environ["MASTER_ADDR"]
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))
        group = RankGroup(0, store, table, int(os.environ.get("LOCAL_RANK", "0")))
        _post({"table": tree, "host": host, "port": store.port})
        group.join()
        return group
    return lead_here(table, [{"table": tree, "local": rank} for rank in range(table.ranks)])


def lead_here(
    table: EngineRead, specs: Sequence[dict[str, Any]], module: str = "plaudit.serve.workers.ranks"
) -> RankGroup:
    """The same on this machine: `module` is run for each other rank with its spec, by `run_rank`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # accept local connections only
    place = tempfile.TemporaryDirectory(prefix="plaudit-ranks-")
    file = f"{place.name}/store"
    group = RankGroup(0, FileStore(file, table.ranks), table, specs[0]["local"], meeting=place)
    for rank, spec in enumerate(specs[1:], 1):
        group.children.append(_start({**spec, "file": file, "rank": rank}, module))
    group.join()
    return group


def subscribe() -> int:
    """A torchrun process with a RANK above 0: runs a rank of every group that is posted, until the server exits."""
    running: list[Child] = []
    board = _board()
    number = 1
    try:
        while (posted := _posted(board, number)) != ENDED:
            running = [child for child in running if child.poll() is None]
            rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
            running.append(_start({**json.loads(posted), "rank": rank, "local": local}))
            number += 1
    except RuntimeError as error:
        for child in running:
            child.wait(LOAD_SECONDS)
        raise RankLost(f"the server on rank 0 has exited: {one_line(error)}") from error
    for child in running:
        child.wait()
    return 0


def _posted(board: Store, number: int) -> str:
    while not board.check([f"{GROUPS}/{number}"]):
        time.sleep(LOOK_SECONDS)
    return board.get(f"{GROUPS}/{number}").decode()


def dismiss() -> None:
    """Rank 0's server exited normally: stop the other processes."""
    board = _board()
    board.set(f"{GROUPS}/{board.add(GROUPS, 1)}", ENDED)


def host_board() -> Store | None:
    """The store for ranks started by hand, which the caller must keep; torchrun has its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return _tcp_store(is_master=True)


def _board() -> Store:
    try:
        return _tcp_store(is_master=False)
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"cannot reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, the address of rank 0: "
            f"{one_line(error)}; check that its node is up and runs the same command"
        ) from error


def _tcp_store(is_master: bool) -> TCPStore:
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_master, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip


def _post(group: dict[str, Any]) -> None:
    board = _board()
    board.set(f"{GROUPS}/{board.add(GROUPS, 1)}", json.dumps(group))


def _start(spec: dict[str, Any], module: str = OWN) -> Child:
    child, sock = spawn(module)
    sock.sendall(pack(spec))
    _lifelines[child.pid] = sock  # open for as long as this process lives: the child exits when it closes
    return child


def leave(why: str) -> NoReturn:
    """Exit because the group is broken: whoever started it restarts it."""
    os.write(sys.stderr.fileno(), f"plaudit: rank {dist.get_rank()}: {why}\n".encode())
    os._exit(RankLost.exit_code)


def _spec(parent: socket.socket) -> dict[str, Any]:
    reader = FrameReader(msgspec.msgpack.Decoder(dict[str, Any]))
    while data := parent.recv(1 << 20):
        for spec in reader.feed(data):
            return spec
    sys.exit(RankLost.exit_code)


def _end_with(parent: socket.socket) -> None:
    """Exit when the parent process has exited, for whatever reason."""
    with suppress(OSError):
        parent.recv(1)
    os._exit(RankLost.exit_code)


def run_rank(fd: int, load: Callable[[RankGroup, dict[str, Any]], Callable[[], None]]) -> None:
    """Runs a rank above 0 from the spec on its socket: `load` returns the function to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=fd)
    spec = _spec(parent)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    table = parse_reward(spec["table"], "the model's table")
    assert isinstance(table, EngineRead)
    if table.threads is not None:
        torch.set_num_threads(table.threads)
    if "file" in spec:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store: Store = FileStore(spec["file"], table.ranks)
    else:
        store = TCPStore(spec["host"], spec["port"], is_master=False, timeout=datetime.timedelta(seconds=30))
    group = RankGroup(spec["rank"], store, table, spec["local"])
    try:
        group.join()
        if table.memory_fraction is not None:
            limit_memory(group.device, table.memory_fraction)
        follow_rank_0 = load(group, spec)
    except (PlauditError, OSError, ValueError, RuntimeError) as error:
        group.fail(error)
        sys.exit(f"plaudit: rank {group.rank}: {one_line(error)}")
    try:
        follow_rank_0()
    except ModelError as error:  # an error of its own layers: the others only see that it disconnected
        group.fail(error)
        sys.exit(f"plaudit: rank {group.rank}: {one_line(error)}")
    except RuntimeError as error:
        leave(f"rank 0 has exited or does not respond: {one_line(error)}")


def _load(group: RankGroup, _: dict[str, Any]) -> Callable[[], None]:
    part = load_part(group.table, group)
    return lambda: follow(backend_of(inspect(part.loaded.module, part.loaded.tokenizer)), part.channel)


def main(fd: int) -> None:
    run_rank(fd, _load)


if __name__ == "__main__":
    main(int(sys.argv[1]))
