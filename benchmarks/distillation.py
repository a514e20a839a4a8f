"""On-policy distillation on the sums world: true accuracy before and after, and the duration of a run.

    python benchmarks/distillation.py [--teacher runs/sums-grpo/final] [--ways token top-k] [--seeds 1 2]

Each run is `plaudit train sums-distill` as a user would start it, in a separate process, including both evaluations.
The teacher is the policy of `plaudit train sums-grpo`. Writes benchmarks/results/distillation.json."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stamp import processor, stamp

OUT = Path(__file__).parent / "results" / "distillation.json"
WAYS: dict[str, list[str]] = {"token": [], "top-k": ["algorithm.teachers.grpo.top_k=4"]}


def run(way: str, seed: int, teacher: Path, directory: Path) -> dict[str, Any]:
    sets = [f"seed={seed}", *WAYS[way]]
    words = [sys.executable, "-m", "plaudit", "train", "sums-distill", "--out", str(directory)]
    words += ["--set", f"algorithm.teachers.grpo.path={teacher.resolve()}"]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([*words, *(word for each in sets for word in ("--set", each))], check=True)
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((directory / "summary.json").read_text())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "way": way, "seed": seed, "settings": sets, "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"], "wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", type=Path, default=Path("runs/sums-grpo/final"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["token"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    options = parser.parse_args()
    taught = json.loads((options.teacher.parent / "summary.json").read_text())
    runs = []
    for way in options.ways:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as directory:
                runs.append(run(way, seed, options.teacher, Path(directory) / "run"))
            print(json.dumps(runs[-1]))
            figures = {"teacher_accuracy": taught["accuracy_after"], "runs": runs}
            OUT.write_text(json.dumps({**stamp(__file__, processor(), {}), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
