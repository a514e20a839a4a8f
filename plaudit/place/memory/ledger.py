"""Memory by owner at the start and the end of every phase, compared with what the device reports.

For each phase the ledger asks every owner what it holds, and the device's meter what is taken. What no owner accounts
for is `unaccounted`, never left out. The peak of a phase, less what the owners and the unaccounted hold, is
`activations`: what came and went within the phase. On the host the meter sees the whole process; what that has without
any of the owners, when the ledger is made, is `program`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plaudit.events import EventLog
from plaudit.place.memory.meter import Meter, new_meter
from plaudit.place.memory.owners import Holdings, holdings_of
from plaudit.train.policy.trainee import Trainee

PROGRAM, ACTIVATIONS, UNACCOUNTED = "program", "activations", "unaccounted"


@dataclass(slots=True)
class Moment:
    """Bytes by owner, and what the meter says; None without one."""

    owners: dict[str, int]
    measured: int | None

    @property
    def accounted(self) -> int:
        return sum(self.owners.values())

    @property
    def unaccounted(self) -> int:
        """Below 0 where owners hold memory that was given to them and never written to."""
        return 0 if self.measured is None else self.measured - self.accounted


@dataclass(slots=True)
class Phase:
    """One phase of a step. One that occurs several times, as updates do, is reported once: where it began first, where
    it ended last, and how it was at its fullest."""

    start: Moment
    end: Moment
    seconds: float = 0.0
    times: int = 0
    peak: int | None = None
    reserved: int | None = None
    fullest: dict[str, int] = field(default_factory=dict)

    def add(self, start: Moment, end: Moment, peak: int | None, reserved: int | None, seconds: float) -> None:
        self.end, self.times, self.seconds = end, self.times + 1, self.seconds + seconds
        fullest = stack(start, end, peak)
        if sum(fullest.values()) >= sum(self.fullest.values()):
            self.fullest, self.peak, self.reserved = fullest, peak, reserved


def stack(start: Moment, end: Moment, peak: int | None) -> dict[str, int]:
    """Who held what when a phase was at its fullest: each owner the more of its two ends, and the rest as
    activations."""
    owners = {name: max(start.owners.get(name, 0), size) for name, size in end.owners.items()}
    owners |= {name: size for name, size in start.owners.items() if name not in owners}
    rest = max(0, start.unaccounted)
    accounted = sum(owners.values()) + rest
    if rest:
        owners[UNACCOUNTED] = rest
    if peak is not None and peak > accounted:
        owners[ACTIVATIONS] = peak - accounted
    return owners


class Ledger:
    """A watcher of the clock. `peak` is the most that was ever taken."""

    def __init__(self, holdings: Holdings, meter: Meter | None) -> None:
        self.holdings = holdings
        self.meter = meter
        self.peak = 0
        self.peaks: dict[str, int] = {}
        """The highest peak of each phase so far."""
        self._phases: dict[str, Phase] = {}
        self._start: Moment | None = None
        self.program = 0
        if meter is not None and meter.whole:
            self.program = max(0, meter.now() - sum(holdings.now().values()))

    def begin(self, phase: str) -> None:
        self._start = self.moment()
        if self.meter is not None:
            self.peak = max(self.peak, self.meter.peak() or 0)  # of what came before: loading, moving
            self.meter.restart()

    def end(self, phase: str, seconds: float) -> None:
        assert self._start is not None
        end = self.moment()
        peak = None if self.meter is None else self.meter.peak()
        reserved = None if self.meter is None else self.meter.reserved()
        if phase not in self._phases:
            self._phases[phase] = Phase(self._start, end)
        self._phases[phase].add(self._start, end, peak, reserved, seconds)
        most = max(self._start.measured or self._start.accounted, end.measured or end.accounted, peak or 0)
        self.peaks[phase] = max(self.peaks.get(phase, 0), most)
        self.peak = max(self.peak, most)

    def moment(self) -> Moment:
        owners = {PROGRAM: self.program} if self.program else {}
        owners |= self.holdings.now()
        return Moment(owners, None if self.meter is None else self.meter.now())

    def write(self, log: EventLog, step: int, version: int | None = None) -> None:
        """The phases since the last call, as `memory` events."""
        phases, self._phases = self._phases, {}
        for name, phase in phases.items():
            log.write("memory", step=step, version=version, phase=name, **self._fields(phase))

    def _fields(self, phase: Phase) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "seconds": round(phase.seconds, 6), "bytes": phase.fullest, "start": _other(phase.start, phase.fullest),
            "end": _other(phase.end, phase.fullest),
        }  # fmt: skip
        if phase.times > 1:
            fields["times"] = phase.times
        if self.meter is not None:
            measured = {"start": phase.start.measured, "end": phase.end.measured, "peak": phase.peak}
            if phase.reserved is not None:
                measured["reserved"] = phase.reserved
            fields |= {"device": self.meter.device, "taken": measured, "capacity": self.meter.capacity}
        return fields


def new_ledger(trainee: Trainee, engine: object, scorer: object) -> Ledger:
    return Ledger(holdings_of(trainee, engine, scorer), new_meter(trainee.decoder.device))


def _other(moment: Moment, fullest: dict[str, int]) -> dict[str, int]:
    """Where a moment differs from the fullest one, so that a long run's log stays short."""
    sizes = {**moment.owners, UNACCOUNTED: moment.unaccounted, ACTIVATIONS: 0}
    names = {**sizes, **fullest}
    return {name: sizes.get(name, 0) for name in names if sizes.get(name, 0) != fullest.get(name, 0)}
