"""The memory section of a report."""

from __future__ import annotations

from typing import Any

from plaudit.report.diagnosis import diagnose
from plaudit.report.finding import size
from plaudit.report.history import history_of
from plaudit.report.memory import timelines

GIB = 1 << 30


def event(phase: str, step: int = 1, capacity: int = 40 * GIB, **more: Any) -> dict[str, Any]:
    gibibytes = {"policy weights": 2, "policy optimizer": 12, "reference weights": 2, "KV": 8}
    gibibytes |= {"policy gradients": 4, "activations": 6} if phase == "update" else {}
    counts = {name: count * GIB for name, count in gibibytes.items()}
    return {
        "kind": "memory", "wall": step, "step": step, "phase": phase, "device": "cuda:0", "bytes": counts,
        "capacity": capacity, **more,
    }  # fmt: skip


def test_the_peak_is_reported_with_its_owners() -> None:
    events = [event("generate", start={"KV": 0}), event("update", end={"activations": 0}), event("generate", step=2)]
    (line,) = timelines(events)
    assert line.name == "cuda:0"
    assert (line.peak.phase, line.peak.step, line.peak.total) == ("update", 1, 34 * GIB)
    assert line.owners == [
        "policy weights", "policy optimizer", "policy gradients", "reference weights", "KV", "activations"
    ]  # fmt: skip
    assert line.bottleneck() == (
        "Memory is fullest in update of step 1: 34 GiB (85 % of 40 GiB). Largest: policy optimizer 12 GiB, "
        "KV 8 GiB, activations 6 GiB."
    )
    assert line.idle() == {"reference weights": 2 * GIB, "KV": 8 * GIB}
    assert line.cure() == (
        '10 GiB of it is idle there (KV, reference weights): placement.name = "swapped" offloads them.'
    )
    generate, update = line.cycle()
    assert generate.start["KV"] == 0
    assert generate.end["KV"] == 8 * GIB
    assert "activations" not in update.start
    assert update.end["activations"] == 0


def test_without_idle_owners_the_fix_is_to_shrink_the_largest() -> None:
    by_owner = {"policy weights": GIB, "activations": 9 * GIB, "unaccounted": 20 * GIB}
    (line,) = timelines([event("update", bytes=by_owner)])
    assert line.cure() == "To need less, lower train.micro_batch_tokens, or set model.recompute = true."
    (line,) = timelines([event("update", bytes=by_owner, capacity=1000 * GIB)])
    assert line.cure() == ""


def test_each_process_and_device_has_its_own_timeline() -> None:
    events = [event("generate"), event("generate", role="rank", rank=1), event("generate", role="rank", rank=1, step=2)]
    assert [(line.name, len(line.phases)) for line in timelines(events)] == [("cuda:0", 1), ("rank 1, cuda:0", 2)]


def test_a_nearly_full_device_has_severity_watch() -> None:
    events = [event("update", step=s, capacity=36 * GIB, role="rank", rank=s) for s in (1, 2)] + [event("update")]
    (finding,) = [each for each in diagnose(history_of("run", events)) if "memory" in each.rule]
    assert (finding.rule, finding.severity) == ("memory nearly full", "watch")
    assert finding.says.startswith("Memory is fullest in update of step 1: 34 GiB (94 % of 36 GiB).")
    (fine,) = [each for each in diagnose(history_of("run", [event("update")])) if "memory" in each.rule]
    assert (fine.rule, fine.severity, fine.cure) == ("memory", "fine", "")


def test_sizes_are_formatted_with_binary_units() -> None:
    assert [size(n) for n in (0, 999, 1000, 1536, 53_400_000, 1 << 30, 1 << 50)] == [
        "0 B", "999 B", "0.977 KiB", "1.5 KiB", "50.9 MiB", "1 GiB", "1.02e+03 TiB"
    ]  # fmt: skip
