"""Offloading by phase: tensors that a phase does not need leave the device and are restored bit for bit.

An offloaded tensor keeps its identity, shape and device and loses its memory; optimizers, hooks, modules and other
holders of a view of that memory, such as FSDP and the optimizer of a shard, see it filled again after the reload. On a
GPU tensors are offloaded to pinned host memory, and those of the next phase are copied back on a separate stream while
the current phase computes, if that does not raise the peak: the first step measures the peak of each phase. On the CPU
there is no second memory: tensors are offloaded to a file, and their memory is returned to the system.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plaudit.core import Engine
from plaudit.place.memory.meter import Meter
from plaudit.place.memory.stores import Store
from plaudit.train.optim.optimizer import Optimizer, local
from plaudit.train.run.clock import Clock


class Resident(Protocol):
    """Something that phases need or do without. `size` is its bytes on the device when it is loaded."""

    here: bool

    @property
    def size(self) -> int: ...

    def leave(self) -> None: ...

    def come(self) -> None:
        """It can be used when this returns."""

    def come_ahead(self) -> bool:
        """Start to load it while others compute; `come` waits for the end. False: not possible."""

    def close(self) -> None:
        """Stop moving; what is offloaded then is lost."""


class Parked:
    """Tensors whose memory is in a store. `frozen`: they never change, and are written there once."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], store: Store, *, frozen: bool = False) -> None:
        self.tensors = tensors
        self.store = store
        self.frozen = frozen
        self.here = True
        self.size = 0
        self._away: list[Tensor] = []
        self._stored = False

    def leave(self) -> None:
        self.store.arrived()
        self._away = memories_of(self.tensors())
        self.size = sum(memory.nbytes for memory in self._away)
        if not (self.frozen and self._stored):
            self.store.save(self._away)
            self._stored = True
        for memory in self._away:
            memory.untyped_storage().resize_(0)
        self.here = False

    def come(self) -> None:
        if not self.here:
            self._take_memory()
            self.store.load(self._away)
        self.store.arrived()

    def come_ahead(self) -> bool:
        if self.store.beside:
            self._take_memory()
            self.store.load_ahead(self._away)
        return self.store.beside

    def close(self) -> None:
        self.store.close()

    def _take_memory(self) -> None:
        for memory in self._away:
            memory.untyped_storage().resize_(memory.nbytes)
        self.here = True


def memories_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """As flat bytes, each memory once, however many of the tensors share it."""
    memories: dict[int, Tensor] = {}
    for tensor in tensors:
        part = local(tensor.detach())
        if not (part.untyped_storage().resizable() or isinstance(tensor, DTensor)):  # a file's, or shared with numpy
            tensor.data = part = part.clone()
        if part.untyped_storage().nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
            memories.setdefault(flat.data_ptr(), flat)
    return list(memories.values())


class Sleeping:
    """The KV cache of an engine: freed, and empty when it is allocated again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.here = True
        self.size = 0

    def leave(self) -> None:
        self.size = max(self.size, self.engine.kv_held())
        self.engine.sleep()
        self.here = False

    def come(self) -> None:
        self.engine.wake()
        self.here = True

    def come_ahead(self) -> bool:
        return False

    def close(self) -> None: ...


class Dropped:
    """Gradients: recomputed in every update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.here = True
        self.size = 0

    def leave(self) -> None:
        self.optimizer.zero()
        self.here = False

    def come(self) -> None:
        self.here = True

    def come_ahead(self) -> bool:
        return False

    def close(self) -> None: ...


class Residency:
    """Attached to the clock. `needs`: the residents of each phase. A phase that is not listed moves nothing."""

    def __init__(
        self, residents: Mapping[str, Resident], needs: Mapping[str, Iterable[str]], clock: Clock, meter: Meter | None
    ) -> None:
        self.residents = dict(residents)
        self.needs = {phase: frozenset(names) & residents.keys() for phase, names in needs.items()}
        self.clock = clock
        self.meter = meter
        self._following: dict[str, str] = {}
        self._peaks: dict[str, int] = {}
        """The most that a phase took, without what came ahead of the next."""
        self._ahead = 0
        self._last = ""

    def add(self, residents: Mapping[str, Resident], phase: str) -> None:
        """Further residents that this phase alone needs."""
        self.residents |= residents
        self.needs[phase] = self.needs[phase].union(residents)

    def begin(self, phase: str) -> None:
        if phase not in self.needs:
            return
        begin = time.monotonic()
        self._following[self._last] = phase
        self._last = phase
        ahead = self._next(phase)
        self.arrange(self.needs[phase], ahead)
        self._ahead = 0
        for name in ahead:
            resident = self.residents[name]
            if resident.here or resident.come_ahead():
                self._ahead += resident.size
        self.clock.count("swap", time.monotonic() - begin)

    def close(self) -> None:
        self.clock.watchers.remove(self)
        for resident in self.residents.values():
            resident.close()

    def end(self, phase: str, seconds: float) -> None:
        peak = None if self.meter is None else self.meter.peak()
        if phase in self.needs and peak is not None:
            self._peaks[phase] = max(self._peaks.get(phase, 0), peak - self._ahead)

    def arrange(self, needed: Iterable[str], kept: Iterable[str] = ()) -> None:
        """Load what is needed, and offload what is neither needed nor kept."""
        needed, stays = set(needed), {*needed, *kept}
        unneeded = [name for name, resident in self.residents.items() if resident.here and name not in stays]
        for name in unneeded:
            self.residents[name].leave()
        if unneeded and torch.cuda.is_available():
            torch.cuda.empty_cache()  # loaded tensors have other sizes than offloaded ones
        for name in needed:
            self.residents[name].come()

    def _next(self, phase: str) -> set[str]:
        """What the phase after this one needs in addition, if it fits below the highest peak."""
        following = self._following.get(phase)
        if following is None or phase not in self._peaks:
            return set()
        ahead = {name for name in self.needs[following] - self.needs[phase] if self.residents[name].size}
        extra = sum(self.residents[name].size for name in ahead)
        return ahead if self._peaks[phase] + extra <= max(self._peaks.values()) else set()
