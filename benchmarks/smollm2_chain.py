"""Summarizes the runs of a chain in one small file: `make smollm2-ppo-rm`, `make smollm2-search`.

    python benchmarks/smollm2_chain.py RUN... --out FILE

For each run: its date, device memory, summary, held-out metrics by step, the means of the mismatch between trainer and
engine and of each phase's seconds, and the step from which `plaudit report` flags the reward as over-optimised.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from plaudit.report.history import history_of
from plaudit.report.rules.reward import over_optimised_held_out
from plaudit.report.source import run_events

MEANS = ("mismatch/abs_mean", "mismatch/k3", "time/")


def distilled(run: Path) -> dict[str, Any]:
    events = run_events(run)
    history = history_of(run.resolve().name, events)
    curves = {name: curve for name, curve in history.curves.items() if curve.finite}
    held = {
        name: list(zip(curve.steps, curve.values, strict=True))
        for name, curve in curves.items()
        if name.startswith("heldout/")
    }
    means = {f"mean {name}": fmean(curve.finite) for name, curve in curves.items() if name.startswith(MEANS)}
    finding = over_optimised_held_out(history)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "date": datetime.fromtimestamp(events[0]["wall"], UTC).isoformat(timespec="seconds"),
        "devices": {device.name: device.peak.capacity for device in history.memory}, "summary": summary,
        **held, **means, "over_optimised_from": finding and finding.step,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = {run.resolve().name: distilled(run) for run in options.runs}
    record = {"script": "benchmarks/smollm2_chain.py", "runs": runs}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
