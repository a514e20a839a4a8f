"""Our own runs against their plans: a step of GRPO on this machine, for three model sizes.

    python benchmarks/planner_own.py [--steps 4]

Calibrates the machine (`plaudit plan --calibrate`), makes models of three sizes, trains each for a few steps and
compares step seconds (the median after the first) and peak memory with the plan for the observed lengths. Seconds are
reported twice, as wall time and as CPU time of the single thread: they agree on idle cores, and under other load only
the CPU time belongs to the run, so the CPU time is compared. Writes benchmarks/results/planner_own.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from plaudit.plan import Constants, ModelShape, TrainingLayout, predict
from plaudit.plan.shape.hardware import Overrides, cluster

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "planner_own.json"
SIZES = {"small": (96, 2, 4), "middle": (256, 4, 4), "large": (384, 6, 6)}
"""hidden, layers, heads"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def plaudit(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "plaudit", *words], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT, cwd=ROOT
    )


def trained(run: Path, *words: str) -> dict[str, float]:
    """Runs training as a process and watches it: metrics per step, and CPU time between steps."""
    process = subprocess.Popen([sys.executable, "-m", "plaudit", "train", *words, "--out", str(run)], cwd=ROOT,
                               stdout=subprocess.DEVNULL, env=ENVIRONMENT)  # fmt: skip
    spent: list[float] = []
    """Processor seconds when each step was over."""
    while process.poll() is None:
        time.sleep(0.02)
        used = processor_seconds(process.pid)
        spent += [used] * (len(steps_of(run)) - len(spent))
    if process.returncode:
        raise SystemExit(f"plaudit train {' '.join(words)} failed")
    steps = steps_of(run)[1:]
    names = ("time/step", "time/generate", "time/update", "length/mean", "length/prompt_mean")
    found = {name: statistics.median(step[name] for step in steps) for name in names}
    own = statistics.median(after - before for before, after in pairwise(spent))
    return {**found, "processor seconds of a step": own, "peak": max(step["perf/peak_bytes"] for step in steps)}


def steps_of(run: Path) -> list[dict[str, float]]:
    path = run / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be incomplete
    events = [json.loads(line) for line in lines if '"time/step"' in line]
    return [event["values"] for event in events]


def processor_seconds(pid: int) -> float:
    """CPU seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    kept: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "models": {}}
    print(f"{'model':8} {'step s':>9} {'planned':>9} {'':>6}   {'peak GB':>9} {'planned':>9}")
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        plaudit("plan", "--calibrate", str(here / "machine.toml"))
        own = Overrides.read(here / "machine.toml")
        place, constants = cluster("1x1xthis-machine", own), Constants().changed(own.constants)
        for name, (hidden, layers, heads) in SIZES.items():
            new = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": heads // 2, "ffn": 3 * hidden}
            sets = [word for key, value in new.items() for word in ("--set", f"model.new.{key}={value}")]
            start = here / f"{name}-start"
            plaudit(
                "train",
                "sums-sft",
                "--set",
                "train.steps=1",
                "--set",
                "data.eval_items=4",
                *sets,
                "--out",
                str(start),
            )
            found = trained(here / name, "sums-grpo", "--set", f"model.path={start}", "--set",
                            f"train.steps={options.steps}", "--set", "data.eval_items=10")  # fmt: skip
            shape = ModelShape.from_config(start / "final" / "config.json")
            cut = TrainingLayout(micro_tokens=8192, plain=True)
            plan = predict(
                shape, place, "colocated", training=cut, constants=constants, batch=512, samples_per_prompt=8,
                algorithm="grpo", reference=False, dtype="fp32", kv_dtype="fp32", plain=True, micro_tokens=8192,
                prompt=found["length/prompt_mean"], response=found["length/mean"], max_response=96,
            )  # fmt: skip
            step, peak = found["processor seconds of a step"], found["peak"]
            planned, held = plan.step.value, plan.peak.value
            made, learned = (plan.phase(phase).seconds.value for phase in ("generation", "training"))
            learned += plan.phase("scoring").seconds.value
            print(f"{name:8} {step:9.2f} {planned:9.2f} {planned / step - 1:+6.0%}   {peak / 1e9:9.2f} "
                  f"{held / 1e9:9.2f} "
                  f"{held / peak - 1:+6.0%}   by the clock {found['time/step']:.2f}: "
                  f"generate {found['time/generate']:.2f} ({made:.2f}), "
                  f"update {found['time/update']:.2f} ({learned:.2f})", flush=True)  # fmt: skip
            kept["models"][name] = {**found, "planned step": plan.step.value, "planned peak": plan.peak.value}  # type: ignore[index]
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
