"""What memory held along a run, device by device, and who filled it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plaudit.events import Event
from plaudit.report.finding import percent, size

# From the bottom of the picture to its top; owners that are not named here follow.
ORDER = (
    "program", "unaccounted", "policy weights", "policy shards", "policy masters", "policy optimizer",
    "policy gradients", "reference weights", "critic weights", "critic masters", "critic optimizer",
    "critic gradients", "reward weights", "channel buffers", "KV", "activations",
)  # fmt: skip
_NOBODY = {"program": "are the program itself", "unaccounted": "have no owner that is known"}
NOBODY = tuple(_NOBODY)
_OUTSIDE = ("evaluate", "checkpoint")  # of a step
_MUCH = 0.3  # of a device's memory: below that there is no need to save
_NAMED = 3

# Which owners a phase works with; others are idle in it. A phase that is not named here says nothing of anybody.
_WORK = {
    "generate": ("policy weights", "KV"),
    "reward": ("reward",),
    "old": ("policy weights", "policy shards"),
    "reference": ("reference",),
    "values": ("critic weights",),
    "update": ("policy",),
    "critic": ("critic",),
}
_LESS = {
    "activations": "lower train.micro_batch_tokens, or set model.recompute = true",
    "KV": "lower engine.kv_bytes",
    "gradients": "train fewer weights (model.lora), or share them out (resources.data_parallel)",
}


@dataclass(frozen=True, slots=True)
class Held:
    """One phase of one step: bytes by owner at its start, at its fullest and at its end."""

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
    phases: Sequence[Held]
    planned: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by phase and owner that the run expected when it began."""

    @property
    def owners(self) -> list[str]:
        found = {name for held in self.phases for name in held.fullest}
        return [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]

    @property
    def peak(self) -> Held:
        return max(self.phases, key=lambda held: held.total)

    def cycle(self) -> list[Held]:
        """The phases of the step that has the peak, from its generation to the next; without evaluations and saves."""
        peak = self.peak
        of_step = [held for held in self.phases if held.step == peak.step]
        names: dict[str, Held] = {}
        for held in of_step:
            if held is peak or held.phase not in _OUTSIDE:
                names.setdefault(held.phase, held)
        return list(names.values())

    def by_phase(self) -> dict[str, Held]:
        """Each phase at its fullest."""
        found: dict[str, Held] = {}
        for held in self.phases:
            if held.phase not in found or held.total > found[held.phase].total:
                found[held.phase] = held
        return dict(sorted(found.items(), key=lambda item: item[0] in _OUTSIDE))

    def bottleneck(self) -> str:
        """Where the peak is, and who makes it."""
        peak = self.peak
        where = f"{peak.phase} of step {peak.step}" if peak.step is not None else peak.phase
        share = f" ({percent(peak.total / peak.capacity)} of {size(peak.capacity)})" if peak.capacity else ""
        owners = {name: held for name, held in peak.fullest.items() if name not in NOBODY}
        largest = sorted(owners.items(), key=lambda item: -item[1])[:_NAMED]
        told = ", ".join(f"{name} {size(held)}" for name, held in largest)
        others = [f"{size(peak.fullest[name])} {words}" for name, words in _NOBODY.items() if peak.fullest.get(name)]
        beside = f"; {' and '.join(others)}" if others else ""
        return f"Memory is fullest in {where}: {size(peak.total)}{share}. Most have {told}{beside}."

    def idle(self) -> dict[str, int]:
        """Owners that only wait while the peak lasts."""
        work = _WORK.get(self.peak.phase)
        if work is None:
            return {}
        return {
            name: held
            for name, held in self.peak.fullest.items()
            if name not in (*NOBODY, "activations") and not name.startswith(work)
        }

    def cure(self) -> str:
        """What would lower the peak; nothing where there is room enough."""
        if self.peak.capacity is not None and self.peak.total < _MUCH * self.peak.capacity:
            return ""
        idle = self.idle()
        if sum(idle.values()) >= 0.1 * self.peak.total:
            waiting = ", ".join(name for name, _ in sorted(idle.items(), key=lambda item: -item[1]))
            return (
                f'{size(sum(idle.values()))} of it wait there ({waiting}): placement.name = "swapped" moves them out '
                "of the way."
            )
        owner = max(
            (name for name in self.peak.fullest if name not in NOBODY), key=self.peak.fullest.__getitem__, default=""
        )
        less = _LESS.get(owner) or next((cure for name, cure in _LESS.items() if owner.endswith(name)), "")
        return f"To need less, {less}." if less else ""


def timelines(events: Sequence[Event], plans: Sequence[Event] = ()) -> list[Timeline]:
    """Of every device and process that logged its memory. The last plan is of the process that learns."""
    expected = plans[-1].get("memory", {}) if plans else {}
    planned = {phase: _counts(owners) for phase, owners in expected.items()}
    phases: dict[str, list[Held]] = {}
    for event in events:
        if event["bytes"]:
            role = f"{event['role']} {event['rank']}, " if "role" in event else ""
            phases.setdefault(f"{role}{event.get('device', '')}".removesuffix(", "), []).append(_held(event, events))
    learns = [name for name in phases if not name.startswith(tuple(f"{e['role']} " for e in events if "role" in e))]
    return [Timeline(name, held, planned if name in learns else {}) for name, held in sorted(phases.items())]


def _held(event: Event, events: Sequence[Event]) -> Held:
    fullest = _counts(event["bytes"])
    resting = {name: held for name, held in fullest.items() if name != "activations"}
    return Held(
        phase=event["phase"], step=event.get("step"), at=float(event["wall"]) - float(events[0]["wall"]),
        seconds=float(event.get("seconds", 0.0)), start={**resting, **_counts(event.get("start", {}))},
        fullest=fullest, end={**resting, **_counts(event.get("end", {}))}, capacity=event.get("capacity"),
    )  # fmt: skip


def _counts(counts: Mapping[str, object]) -> dict[str, int]:
    return {name: int(float(count)) for name, count in counts.items()}  # type: ignore[arg-type]
