"""A self-contained HTML page about runs: loads nothing from the network, and samples cannot run scripts in it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plaudit.events import Event
from plaudit.report.diagnosis import diagnose, verdict
from plaudit.report.headline import headline, kind, method
from plaudit.report.history import FIGURES, History
from plaudit.report.memory import PhaseMemory, Timeline

# Limits of the data on one page, so that a browser opens the page of a long run quickly.
MOST_POINTS, MOST_STRIPES, MOST_MEMORY, MOST_SAMPLE_TOKENS = 1000, 200, 600, 200_000

_SAMPLE_FIELDS = (
    "step", "version", "group", "index", "prompt", "response", "tokens", "mask", "reward", "error", "right",
    "finish_reason", "token_rewards", "kl", "logprobs", "advantages",
)  # fmt: skip
_PER_TOKEN = ("token_rewards", "kl", "logprobs", "advantages")
_TEMPLATE = Path(__file__).with_name("page.html")
_DATA, _POLICY, _MAY_ASK = "{{data}}", "{{script-hash}}", "{{may-ask}}"


def render_page(runs: Sequence[History]) -> str:
    return filled(_TEMPLATE.read_text(encoding="utf-8").replace(_MAY_ASK, ""), page_data(runs))


def live_page() -> str:
    """The page without data: it polls the server it was loaded from."""
    return filled(_TEMPLATE.read_text(encoding="utf-8").replace(_MAY_ASK, "; connect-src 'self'"), {"live": True})


def page_data(runs: Sequence[History]) -> dict[str, Any]:
    return {"labels": FIGURES, "runs": [_run(run) for run in runs]}


def filled(template: str, data: Mapping[str, Any]) -> str:
    """A page with its data. The browser runs only the page's own script, whatever texts contain."""
    script = template.split("<script>")[1].split("</script>")[0]
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.replace(_POLICY, own).replace(_DATA, _embedded(data))


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe in a script element: no character in it can end the element or begin another."""
    return as_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(_plain(data), allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Numbers rounded to six digits; non-finite numbers become null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _run(run: History) -> dict[str, Any]:
    findings = diagnose(run)
    severity, summary = verdict(run, findings, held_out=False)
    first = headline(run)
    return {
        "name": run.name,
        "kind": kind(run),
        "method": method(run),
        "headline": first.words if first else (),
        "headlined": first.metric if first else None,
        "evaluated": run.evaluated(),
        "steps": run.steps,
        "planned": run.planned_steps,
        "seconds": run.seconds,
        "severity": severity,
        "verdict": summary,
        "proof": run.proof,
        "findings": [asdict(finding) for finding in findings],
        "curves": {name: _points(run, name) for name in run.curves},
        "times": run.time_split(),
        "stripes": _stripes(run),
        "memory": [_memory(line) for line in run.memory],
        "samples": _samples(run.samples),
    }


def _points(run: History, name: str) -> list[Sequence[float]]:
    curve = run.curves[name].thinned(MOST_POINTS)
    return [curve.steps, curve.values]


def _stripes(run: History) -> dict[str, Any]:
    """Seconds of every phase along the run, as means over intervals of steps: the layers of a stacked area."""
    phases = run.phases()
    steps = sorted({step for points in phases.values() for step, _ in points})
    if not steps:
        return {"steps": [], "layers": {}}
    count = min(MOST_STRIPES, len(steps))
    place = {step: i * count // len(steps) for i, step in enumerate(steps)}
    size = [0] * count
    for part in place.values():
        size[part] += 1
    layers = {}
    for name, points in phases.items():
        sums = [0.0] * count
        for step, seconds in points:
            sums[place[step]] += seconds
        layers[name] = [total / size[i] for i, total in enumerate(sums)]
    first = {part: step for step, part in reversed(place.items())}
    return {"steps": [first[part] for part in range(count)], "layers": layers}


def _memory(line: Timeline) -> dict[str, Any]:
    peak = line.peak
    return {
        "name": line.name,
        "owners": line.owners,
        "says": " ".join(filter(None, (line.bottleneck(), line.cure()))),
        "peak": {"phase": peak.phase, "step": peak.step, "bytes": peak.total},
        "cycle": [{"phase": usage.phase, "start": usage.start, "fullest": usage.fullest, "end": usage.end}
                  for usage in line.cycle()],
        "fullest": [_moment(usage) for usage in line.by_phase().values()],
        "planned": line.planned,
        "moments": [_moment(usage) for usage in _thinned(line.phases)],
    }  # fmt: skip


def _moment(usage: PhaseMemory) -> dict[str, Any]:
    return {"at": usage.at, "step": usage.step, "phase": usage.phase, "bytes": usage.fullest}


def _thinned(phases: Sequence[PhaseMemory]) -> list[PhaseMemory]:
    """The phase with the most memory of each interval."""
    count = min(MOST_MEMORY, len(phases))
    stretches = [phases[i * len(phases) // count : (i + 1) * len(phases) // count] for i in range(count)]
    return [max(stretch, key=lambda usage: usage.total) for stretch in stretches]


def _samples(events: Sequence[Event]) -> list[dict[str, Any]]:
    """All samples of a short run; of a long one those of evenly spaced steps, including the first and the last."""
    by_step: dict[int, list[Event]] = {}
    for event in events:
        by_step.setdefault(event.get("step", 0), []).append(event)
    steps = sorted(by_step)
    tokens = sum(len(event.get("tokens") or ()) for event in events)
    keep = max(2, len(steps) * MOST_SAMPLE_TOKENS // max(1, tokens))
    if keep < len(steps):
        steps = [steps[i * (len(steps) - 1) // (keep - 1)] for i in range(keep)]
    return [_sample(event) for step in steps for event in by_step[step]]


def _sample(event: Event) -> dict[str, Any]:
    kept = {"step": 0, **{key: event[key] for key in _SAMPLE_FIELDS if key in event}}
    # Non-finite numbers are strings in the log.
    if kept.get("reward") is not None:
        kept["reward"] = float(kept["reward"])
    for key in _PER_TOKEN:
        if kept.get(key) is not None:
            kept[key] = [None if value is None else float(value) for value in kept[key]]
    return kept
