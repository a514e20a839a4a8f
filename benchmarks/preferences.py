"""Preference methods on the sums world: true accuracy before and after, and the duration of a run.

    python benchmarks/preferences.py [METHOD ...] [--seeds 1 2 3]

Each run is `plaudit train sums-dpo` as a user would start it, in a separate process: sampling the responses, their
reference log-probs, training, both evaluations. Writes benchmarks/results/preferences.json."""

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

OUT = Path(__file__).parent / "results" / "preferences.json"
# Methods that need other settings than the recipe's.
SETTINGS: dict[str, list[str]] = {
    "dpo": [],
    "ipo": ["algorithm.beta=0.1"],
    "kto": ["algorithm.beta=1.0"],
    "orpo": ["algorithm.beta=0.3", "train.lr=1e-3"],
    "simpo": ["algorithm.beta=10.0", "algorithm.gamma=3.0"],
}


def run(method: str, seed: int, directory: Path) -> dict[str, Any]:
    sets = [f"seed={seed}", f"algorithm.name={method}", *SETTINGS[method]]
    words = [sys.executable, "-m", "plaudit", "train", "sums-dpo", "--out", str(directory)]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([*words, *(word for each in sets for word in ("--set", each))], check=True)
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((directory / "summary.json").read_text())
    figures = {name: summary[name] for name in ("accuracy_before", "accuracy_after")}
    figures |= {"greedy": summary["accuracy/sums/greedy"], "hard": summary["accuracy/sums-hard/sampled"]}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "method": method, "seed": seed, "settings": sets, **figures, "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1), "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["dpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    options = parser.parse_args()
    runs = []
    for method in options.methods:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as directory:
                runs.append(run(method, seed, Path(directory) / "run"))
            print(json.dumps(runs[-1]))
            OUT.write_text(json.dumps({**stamp(__file__, processor(), {}), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
