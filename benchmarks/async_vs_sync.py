"""Async rollouts compared with synchronous ones: the same recipe, rollouts pinned to one core and the learner to the
other.

    python benchmarks/async_vs_sync.py [--quick] [--seeds 2]

GRPO on the sums world with a KL to the reference, 64 prompts × 8 samples per step. `disaggregated` generates, then
trains; `async` generates the next steps' samples while it trains, with staleness 1 and 2. Samples per second come from
the median step after the first two, by the learner's clock, averaged over seeds; held-out accuracy is measured before
and after. Each run is a separate process, one at a time. Writes benchmarks/results/async_vs_sync.json, unless --quick.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "async_vs_sync.json"
AIM = 1.4
WARMUP = 2
SIDES: dict[str, dict[str, Any]] = {
    "disaggregated": {"name": "disaggregated"},
    "async, staleness 1": {"name": "async", "staleness": 1},
    "async, staleness 2": {"name": "async", "staleness": 2},
}  # fmt: skip


def tree(placement: dict[str, Any], seed: int, steps: int, cores: tuple[int, int]) -> dict[str, Any]:
    learner, rollout = cores
    return {
        "task": "rl", "seed": seed, "model": {"path": "sums-policy"}, "data": {"world": "sums", "eval_items": 500},
        "reward": {"rule": "exact", "answer": r"#(\d+)$"}, "algorithm": {"name": "grpo", "kl": {"coef": 0.001}},
        "train": {
            "steps": steps, "prompts_per_step": 64, "samples_per_prompt": 8, "lr": 1e-4, "threads": 1, "epochs": 1,
            "eval_every": 10 * steps, "checkpoint": {"every": 10 * steps}, "show": 0,
        },
        "sampling": {"max_tokens": 96}, "placement": placement,
        "resources": {"cores": [learner], "rollout": {"processes": 1, "cores": [rollout]}},
    }  # fmt: skip


def side(recipe: dict[str, Any], folder: str) -> dict[str, Any]:
    """Runs one configuration in this process."""
    from plaudit.config import RlRecipe, parse_recipe
    from plaudit.rl.follower import NoViewer
    from plaudit.rl.loop import RlTraining
    from plaudit.train.run.run import Run

    seen: list[dict[str, float]] = []

    class Watch(NoViewer):
        def step(self, step: int, metrics: Any) -> None:
            seen.append(dict(metrics))

    parsed = parse_recipe(recipe, "benchmark")
    assert isinstance(parsed, RlRecipe)
    with Run(Path(folder), parsed) as run:
        summary = RlTraining(parsed, run, Watch()).fit()
    timed = seen[WARMUP:]
    samples = parsed.train.prompts_per_step * parsed.train.samples_per_prompt
    parts = sorted({key for step in timed for key in step if key.startswith("time/")})
    return {
        "samples_per_second": samples / statistics.median(step["time/step"] for step in timed),
        "seconds_per_step": {key[5:]: statistics.median(step.get(key, 0.0) for step in timed) for key in parts},
        "accuracy_before": summary["accuracy_before"], "accuracy_after": summary["accuracy_after"],
        "staleness_mean": statistics.mean(step["staleness/mean"] for step in timed),
        "staleness_max": max(step["staleness/max"] for step in timed),
    }  # fmt: skip


def measured(recipe: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--side", json.dumps(recipe), "--folder", folder]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3600,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one seed; writes no results")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(side(json.loads(options.side), options.folder)))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for rollouts, one for the learner")
    steps, seeds = (8, 1) if options.quick else (50, options.seeds)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for seed in range(1, seeds + 1):
        for name, placement in SIDES.items():  # alternate sides: other load affects both
            found[name].append(measured(tree(placement, seed, steps, (cores[0], cores[1]))))
    rows: list[dict[str, Any]] = []
    for name, runs in found.items():
        row: dict[str, Any] = {"side": name, "steps": steps, "seeds": seeds}
        row |= {key: statistics.mean(run[key] for run in runs) for key in runs[0] if key != "seconds_per_step"}
        row["accuracies_after"] = [run["accuracy_after"] for run in runs]
        row["seconds_per_step"] = runs[0]["seconds_per_step"]
        row["speedup"] = row["samples_per_second"] / (rows[0] if rows else row)["samples_per_second"]
        rows.append(row)
        print(
            f"{name:20} {row['samples_per_second']:7.1f} samples/s  × {row['speedup']:.2f}  accuracy "
            f"{row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}  oldest {row['staleness_max']:.0f}",
            flush=True,
        )  # fmt: skip
    best = max(row["speedup"] for row in rows)
    print(f"async is {best:.2f} times the synchronous one; the aim is {AIM}")
    if options.quick:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    RESULTS.write_text(
        json.dumps(
            {
                "script": "benchmarks/async_vs_sync.py", "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": commit.strip(), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "load": os.getloadavg(), "python": platform.python_version(), "torch": version("torch"), "aim": AIM,
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
