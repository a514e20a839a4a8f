"""The processes that train together: which one this is, and how bytes pass between them.

A rank has a position on a mesh of shards × tensor_parallel, where shards are data_parallel × context_parallel; each
stage of a pipeline has such a mesh. `plaudit train` starts the ranks itself (launch.py); under torchrun they exist
already. What they exchange besides tensors is msgpack, never pickle, and every exchange has a time limit.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plaudit.config.placement import RanksTable
from plaudit.errors import ConfigError, RankLost, StorageError
from plaudit.train.run.launch import PARENT

DATA, TENSOR = "data", "tensor"
COPIES, EXPERT = "copies", "expert"
STAGE = "stage"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Group:
    """Ranks that share work. A group of one communicates nothing."""

    index: int = 0
    size: int = 1
    channel: dist.ProcessGroup | None = None

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather: the data of every rank of the group, in rank order."""
        if self.size == 1:
            return [data]
        with named_losses():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), self.channel)
            longest = max(int(size) for size in sizes)
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
            received = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(received, mine, self.channel)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(received, sizes, strict=True)]

    def gather_values(self, value: Any, kind: Any = Any) -> list[Any]:
        """The same for plain values and records, of types that msgspec can encode."""
        return [msgspec.msgpack.decode(part, type=kind) for part in self.gather(msgspec.msgpack.encode(value))]

    def from_main(self, value: Any, kind: Any = Any) -> Any:
        """Broadcast: the first rank's value, on every rank; the others' own values are ignored."""
        if self.size == 1:
            return value
        assert self.channel is not None
        data = msgspec.msgpack.encode(value) if self.index == 0 else b""
        with named_losses():
            first = dist.get_global_rank(self.channel, 0)
            size = torch.tensor([len(data)])
            dist.broadcast(size, first, self.channel)
            sent = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
            dist.broadcast(sent, first, self.channel)
        return value if self.index == 0 else msgspec.msgpack.decode(sent.numpy().tobytes(), type=kind)

    def concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts of all ranks concatenated in rank order, on the CPU. Each rank passes its own, in order."""
        mine = torch.cat([part.cpu() for part in parts]) if parts else torch.empty(0)
        if self.size == 1:
            return mine
        array = mine.numpy()
        shares = self.gather_values((array.dtype.str, array.tobytes()), tuple[str, bytes])
        # A rank without parts does not know the dtype of the others'.
        filled = [torch.from_numpy(np.frombuffer(data, kind).copy()) for kind, data in shares if data]
        return torch.cat(filled) if filled else mine

    def any(self, true: bool) -> bool:
        """Whether it is true on any rank, for decisions that must be the same on all."""
        return any(self.gather_values(true, bool))

    def barrier(self) -> None:
        self.gather(b"")

    def share(self, count: int, index: int | None = None) -> range:
        """The range of this rank (or of rank `index`) in `count` items; sizes differ by at most one."""
        index = self.index if index is None else index
        return range(count * index // self.size, count * (index + 1) // self.size)


ONE = Group()


@dataclass(frozen=True)
class Ranks:
    """everyone   all ranks: they share rollouts and rewards
    data       ranks with the same part of each matrix and of each row: they share a minibatch
    context    ranks with the same part of each matrix and the same micro-batches: they split the rows of each
    mesh       (data × context, tensor), of this rank's stage; None for one process, which shards nothing
    stages     ranks with the same position on the meshes of all stages: rows are sent from one to the next
    back       the same ranks, with a separate channel for gradients
    ends       the first and the last of them
    readers    `data` of all stages, in the order of the stages: they exchange the results of the last stage
    expert     ranks of data × context × tensor that have all experts of a mixture between them
    experts    (copies, expert): the mesh of this rank's stage for sharded experts; else None
    """

    everyone: Group = ONE
    data: Group = ONE
    context: Group = ONE
    mesh: DeviceMesh | None = None
    expert: Group = ONE
    experts: DeviceMesh | None = None
    stages: Group = ONE
    back: Group = ONE
    ends: Group = ONE
    readers: Group = ONE

    @property
    def main(self) -> bool:
        """Whether this is the main rank, which writes files and logs."""
        return self.everyone.index == 0


ALONE = Ranks()


@contextmanager
def join(resources: RanksTable, device: str) -> Iterator[Ranks]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Without these
    variables the process is a single rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != resources.ranks:
        names, sizes = resources.product
        raise ConfigError(
            f"WORLD_SIZE = {world} processes were started, and resources.{names} = {sizes} = {resources.ranks}: make "
            "them equal"
        )
    if world == 1:
        yield ALONE
        return
    _end_with_parent()
    cuda = device.startswith("cuda")
    if cuda:
        _take_gpu()
    with named_losses():
        limit = timedelta(seconds=resources.timeout)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=limit)
        shape = (resources.pipeline_parallel, resources.shards, resources.tensor_parallel)
        mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=(STAGE, DATA, TENSOR))[DATA, TENSOR]
        places = np.arange(world).reshape(
            shape[0], resources.data_parallel, resources.context_parallel, resources.tensor_parallel
        )
        # Groups for bytes only, separate from those of the model's tensors.
        data = groups_along(places, 1, "gloo", limit)
        readers = groups_along(places.reshape(-1, *places.shape[2:]), 0, "gloo", limit) if shape[0] > 1 else data
        everyone = dist.new_group(list(range(world)), backend="gloo", timeout=limit)
        # For tensors of the model.
        context, stages, back = (groups_along(places, axis, backend, limit) for axis in (2, 0, 0))
        ends = groups_along(places[[0, -1]], 0, backend, limit) if shape[0] > 1 else ONE
        expert, experts = ONE, None
        if (size := resources.expert_parallel) > 1:
            expert = groups_along(np.arange(world).reshape(-1, size), 1, backend, limit)
            dealt = (shape[0], resources.shards * resources.tensor_parallel // size, size)
            axes = (STAGE, COPIES, EXPERT)
            experts = init_device_mesh(mesh.device_type, dealt, mesh_dim_names=axes)[COPIES, EXPERT]
        yield Ranks(
            Group(dist.get_rank(), world, everyone), data, context, mesh, expert, experts, stages, back, ends, readers
        )
    dist.destroy_process_group()  # only after success: after a failure other ranks may be lost


def groups_along(places: np.ndarray, axis: int, backend: str, limit: timedelta) -> Group:
    """The ranks that differ from this one only along an axis. All ranks create all groups, in the same order."""
    size, own = places.shape[axis], ONE
    if size == 1:
        return ONE
    for row in np.moveaxis(places, axis, -1).reshape(-1, size).tolist():
        channel = dist.new_group(row, backend=backend, timeout=limit)
        if dist.get_rank() in row:
            own = Group(row.index(dist.get_rank()), size, channel)
    return own


def together(group: Group, write: Callable[[], object]) -> None:
    """Let every rank write its part. A failure on one rank is raised on all, which would otherwise wait."""
    reason = ""
    try:
        write()
    except (OSError, StorageError) as error:
        if group.size == 1:
            raise
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(group.gather_values(reason, str)) if text]
    if failures:
        raise StorageError(failures[0])


@contextmanager
def named_losses() -> Iterator[None]:
    """Turn torch's error of a failed exchange into RankLost."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss(error):
            raise
        raise RankLost(f"another rank has exited or does not respond: {str(error).splitlines()[0]}") from error


def is_loss(error: BaseException) -> bool:
    """Whether an error is a failed exchange between ranks: torch has types for some; gloo's are known by their text."""
    network_errors = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, network_errors) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _take_gpu() -> None:
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"rank {os.environ['RANK']} is number {local} on this machine, which has {count} GPU(s): one rank takes "
            'one GPU; set resources to fewer ranks, or model.device = "cpu"'
        )
    torch.cuda.set_device(local)


def _end_with_parent() -> None:
    """End this rank if its launcher is killed: nothing else would end ranks that wait for each other."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            raise RankLost(f"the process {parent} that started this rank has ended")
