"""SmolLM2-135M on its recipes, several seeds at once on one GPU: the held-out reward over time.

    python benchmarks/smollm2_learning.py [RECIPE] [--seeds 1,2,3] [--out FILE] [--set KEY=VALUE ...]

The runs share the GPU, so each takes longer than it would alone. Writes benchmarks/results/<recipe>.json unless --out
is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def start(recipe: Path, seed: int, sets: list[str], run: Path) -> subprocess.Popen[bytes]:
    words = [word for key in (*sets, f"seed={seed}") for word in ("--set", key)]
    command = [sys.executable, "-m", "plaudit", "train", str(recipe), "--fresh", "--out", str(run), *words]
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=log, stderr=subprocess.STDOUT)


def curve(run: Path) -> dict[str, Any]:
    seconds, held, trained, apart, kl = 0.0, [], [], [], []
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        values = event.get("values", {})
        if event["kind"] != "metric":
            continue
        if "heldout/reward" in values:
            held.append([event["step"], round(seconds, 1), values["heldout/reward"]])
        if "time/step" in values:
            seconds += values["time/step"]
            trained.append(round(values["reward/mean"], 4))
            apart.append(round(values["mismatch/abs_mean"], 5))
            kl.append(round(values["mismatch/k3"], 6))
    summary = json.loads((run / "summary.json").read_text())
    mismatch = {"abs_mean": apart, "k3": kl}  # difference between the engine's and the trainer's log-probs
    return {"heldout": held, "trained": trained, "mismatch": mismatch, "seconds": seconds, "summary": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "plaudit" / "recipes" / "smollm2-grpo.toml")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    import torch

    record: dict[str, Any] = {
        "script": "benchmarks/smollm2_learning.py", "recipe": options.recipe.name, "set": options.set,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__, "transformers": version("transformers"), "together": len(seeds), "seeds": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        runs = {seed: Path(place) / f"seed-{seed}" for seed in seeds}
        started = {seed: start(options.recipe, seed, options.set, run) for seed, run in runs.items()}
        for seed, process in started.items():
            if process.wait():
                raise SystemExit(f"seed {seed} failed:\n{runs[seed].with_suffix('.log').read_text()[-2000:]}")
            found = curve(runs[seed])
            record["seeds"][seed] = found
            first, last = found["heldout"][0], found["heldout"][-1]
            print(f"seed {seed}: held-out reward {first[2]:.3f} -> {last[2]:.3f} in {last[1]:.0f} s", flush=True)
            print("  " + " ".join(f"{step}:{reward:.2f}" for step, _, reward in found["heldout"]))
    out = options.out or ROOT / "benchmarks" / "results" / f"{options.recipe.stem}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
