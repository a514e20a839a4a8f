"""Memory use of a run by device and owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plaudit.events import Event
from plaudit.report.finding import percent, size

# The order from the bottom of the picture to its top; other owners follow.
ORDER = (
    "program", "unaccounted", "policy weights", "policy shards", "policy masters", "policy optimizer",
    "policy gradients", "reference weights", "teacher weights", "critic weights", "critic masters",
    "critic optimizer", "critic gradients", "reward weights", "channel buffers", "KV", "activations",
)  # fmt: skip
_NOBODY = {"program": "are the program itself", "unaccounted": "have no known owner"}
NOBODY = tuple(_NOBODY)
_OUTSIDE = ("evaluate", "checkpoint")  # phases outside of a step
_MUCH = 0.3  # share of a device's memory below which no advice is given
_NAMED = 3

# Owners that a phase uses; the others are idle in it. Phases not listed here count as unknown.
_WORK = {
    "generate": ("policy weights", "KV"),
    "reward": ("reward",),
    "old": ("policy weights", "policy shards"),
    "reference": ("reference",),
    "teachers": ("teacher",),
    "values": ("critic weights",),
    "update": ("policy",),
    "critic": ("critic",),
}
_LESS = {
    "activations": "lower train.micro_batch_tokens, or set model.recompute = true",
    "KV": "lower engine.kv_bytes",
    "gradients": "train fewer weights (model.lora), or shard them (resources.data_parallel)",
}


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """One phase of one step: bytes by owner at its start, at its peak and at its end."""

    phase: str
    step: int | None
    at: float
    seconds: float
    start: Mapping[str, int]
    fullest: Mapping[str, int]
    end: Mapping[str, int]
    capacity: int | None

    @property
    def total(self) -> int:
        return sum(self.fullest.values())


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of one device, or of one process on the host."""

    name: str
    phases: Sequence[PhaseMemory]
    planned: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by phase and owner that were planned at the start of the run."""

    @property
    def owners(self) -> list[str]:
        owners = {name for usage in self.phases for name in usage.fullest}
        return [*(name for name in ORDER if name in owners), *sorted(owners - set(ORDER))]

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda usage: usage.total)

    def cycle(self) -> list[PhaseMemory]:
        """The phases of the step with the peak, from its generation to the next, without evaluations and
        checkpoints."""
        peak = self.peak
        of_step = [usage for usage in self.phases if usage.step == peak.step]
        names: dict[str, PhaseMemory] = {}
        for usage in of_step:
            if usage is peak or usage.phase not in _OUTSIDE:
                names.setdefault(usage.phase, usage)
        return list(names.values())

    def by_phase(self) -> dict[str, PhaseMemory]:
        """Each phase at its peak."""
        fullest: dict[str, PhaseMemory] = {}
        for usage in self.phases:
            if usage.phase not in fullest or usage.total > fullest[usage.phase].total:
                fullest[usage.phase] = usage
        return dict(sorted(fullest.items(), key=lambda item: item[0] in _OUTSIDE))

    def bottleneck(self) -> str:
        """Where the peak is, and its largest owners."""
        peak = self.peak
        where = f"{peak.phase} of step {peak.step}" if peak.step is not None else peak.phase
        share = f" ({percent(peak.total / peak.capacity)} of {size(peak.capacity)})" if peak.capacity else ""
        owners = {name: amount for name, amount in peak.fullest.items() if name not in NOBODY}
        largest = sorted(owners.items(), key=lambda item: -item[1])[:_NAMED]
        most = ", ".join(f"{name} {size(amount)}" for name, amount in largest)
        others = [f"{size(peak.fullest[name])} {words}" for name, words in _NOBODY.items() if peak.fullest.get(name)]
        beside = f"; {' and '.join(others)}" if others else ""
        return f"Memory is fullest in {where}: {size(peak.total)}{share}. Largest: {most}{beside}."

    def idle(self) -> dict[str, int]:
        """Owners that are idle during the peak."""
        work = _WORK.get(self.peak.phase)
        if work is None:
            return {}
        return {
            name: amount
            for name, amount in self.peak.fullest.items()
            if name not in (*NOBODY, "activations") and not name.startswith(work)
        }

    def cure(self) -> str:
        """A way to lower the peak; empty if there is enough memory."""
        if self.peak.capacity is not None and self.peak.total < _MUCH * self.peak.capacity:
            return ""
        idle = self.idle()
        if sum(idle.values()) >= 0.1 * self.peak.total:
            waiting = ", ".join(name for name, _ in sorted(idle.items(), key=lambda item: -item[1]))
            return (
                f'{size(sum(idle.values()))} of it is idle there ({waiting}): placement.name = "swapped" offloads them.'
            )
        owner = max(
            (name for name in self.peak.fullest if name not in NOBODY), key=self.peak.fullest.__getitem__, default=""
        )
        less = _LESS.get(owner) or next((cure for name, cure in _LESS.items() if owner.endswith(name)), "")
        return f"To need less, {less}." if less else ""


def timelines(events: Sequence[Event], plans: Sequence[Event] = ()) -> list[Timeline]:
    """Timelines of every device and process that logged its memory. The last plan is that of the learner's process."""
    expected = plans[-1].get("memory", {}) if plans else {}
    planned = {phase: _counts(owners) for phase, owners in expected.items()}
    phases: dict[str, list[PhaseMemory]] = {}
    for event in events:
        if event["bytes"]:
            role = f"{event['role']} {event['rank']}, " if "role" in event else ""
            phases.setdefault(f"{role}{event.get('device', '')}".removesuffix(", "), []).append(
                _phase_memory(event, events)
            )
    learns = [name for name in phases if not name.startswith(tuple(f"{e['role']} " for e in events if "role" in e))]
    return [Timeline(name, usages, planned if name in learns else {}) for name, usages in sorted(phases.items())]


def _phase_memory(event: Event, events: Sequence[Event]) -> PhaseMemory:
    fullest = _counts(event["bytes"])
    resting = {name: amount for name, amount in fullest.items() if name != "activations"}
    return PhaseMemory(
        phase=event["phase"], step=event.get("step"), at=float(event["wall"]) - float(events[0]["wall"]),
        seconds=float(event.get("seconds", 0.0)), start={**resting, **_counts(event.get("start", {}))},
        fullest=fullest, end={**resting, **_counts(event.get("end", {}))}, capacity=event.get("capacity"),
    )  # fmt: skip


def _counts(counts: Mapping[str, object]) -> dict[str, int]:
    return {name: int(float(count)) for name, count in counts.items()}  # type: ignore[arg-type]
