"""RL training compared with TRL's GRPOTrainer, in one run on one machine, each with both thread counts.

    python benchmarks/rl_vs_trl.py [--quick] [--only throughput|accuracy] [--seeds 3]

    throughput  a random Llama of 6.9M parameters (6 layers, 256 wide, vocabulary 8,192) with a rule that gives its
                samples different rewards: 8 prompts × 8 samples of 32 tokens per step; the median step after warm-up
    accuracy    sums-policy on the sums world, 64 prompts × 8 samples of at most 96 tokens per step: seconds until the
                held-out accuracy is reached, which the same code measures for both every few steps, outside the timed
                region
Prompts, rule, GRPO's loss (no KL), AdamW, learning rate, betas and clipping are the same for both. TRL generates with
transformers, its default on a CPU. One trainer runs at a time, in a separate process; the better of 1 and 2 threads
counts. Writes benchmarks/results/rl_vs_trl.json, unless only a part was run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RIVALS = ROOT / "benchmarks" / "rivals"
RESULTS = ROOT / "benchmarks" / "results" / "rl_vs_trl.json"
TRL_PYTHON = ROOT / ".venv-interop" / "bin" / "python"
SIDES = {
    "plaudit": [sys.executable, __file__, "--side"],
    "trl": [str(TRL_PYTHON), str(RIVALS / "trl_grpo.py")],
}
AIM = 3.0
TARGET = 0.9


def work(part: str, quick: bool, folder: Path) -> dict[str, Any]:
    if part == "throughput":
        return {
            "policy": str(folder / "llama"), "prompts": 8, "samples": 8, "max_tokens": 32, "steps": 5 if quick else 20,
            "warmup": 2 if quick else 4, "lr": 1e-5, "eval_every": 0, "eval_items": 8, "target": 2.0,
            "reward": {"rule": "function", "function": f"{RIVALS / 'even_words.py'}:share"},
        }  # fmt: skip
    return {
        "policy": str(ROOT / "plaudit" / "embedded" / "sums-policy"), "prompts": 64, "samples": 8, "max_tokens": 96,
        "steps": 8 if quick else 150, "warmup": 2, "lr": 3e-4, "eval_every": 4, "eval_items": 100 if quick else 500,
        "target": TARGET, "reward": {"rule": "exact", "answer": r"#(\d+)$"},
    }  # fmt: skip


def prompts(part: str, count: int, seed: int) -> dict[str, list[str]]:
    from plaudit.config.supervised import SumsTable
    from plaudit.worlds import get_world

    if part == "throughput":
        draw = random.Random(seed)
        texts = [" ".join(f"w{draw.randrange(5, 8192)}" for _ in range(8)) for _ in range(count)]
        return {"texts": texts, "answers": [""] * count}
    world = get_world("sums", seed, SumsTable())
    problems = [world.problem("train", index) for index in range(count)]
    return {"texts": [p.prompt for p in problems], "answers": [str(p.answer) for p in problems]}


def save_llama(directory: Path) -> None:
    from core_cpu import word_tokenizer

    from plaudit.models import new_llama, save

    module = new_llama(
        "policy", vocab_size=8192, hidden_size=256, layers=6, heads=4, kv_heads=4, intermediate_size=704,
        max_positions=256, seed=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save(module, word_tokenizer(8192), directory)


class Watch:
    """Records a run's metrics; evaluation stops the clock."""

    def __init__(self, given: dict[str, Any]) -> None:
        from rivals.sums_accuracy import SumsAccuracy

        self.given = given
        self.judge = SumsAccuracy(given["policy"], given["eval_items"]) if given["eval_every"] else None
        self.steps: list[dict[str, float]] = []
        self.accuracy: list[tuple[int, float, float]] = []
        self.seconds = 0.0
        self.begin = self.cpu = 0.0
        self.module: Any = None

    def bar(self, done: int, total: int) -> AbstractContextManager[None]:
        return nullcontext()

    def figures(self, step: int, figures: dict[str, float]) -> None:
        if step == 0:
            self._evaluate(0)
            self.begin, self.cpu = time.perf_counter(), time.process_time()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        seconds = time.perf_counter() - self.begin
        self.seconds += seconds
        spent = {name: metrics[f"time/{name}"] for name in ("generate", "reward")}
        self.steps.append({"step": seconds, "cpu": time.process_time() - self.cpu, **spent})
        self._evaluate(step)
        if self.accuracy and self.accuracy[-1][2] >= self.given["target"]:
            raise Reached
        self.begin, self.cpu = time.perf_counter(), time.process_time()

    def warn(self, message: str) -> None:
        print(message, file=sys.stderr)

    def _evaluate(self, step: int) -> None:
        if self.judge is not None and step % self.given["eval_every"] == 0:
            self.accuracy.append((step, self.seconds, self.judge.of(self.module)))


class Reached(Exception):
    """Raised when the target accuracy is reached."""


def run_plaudit(given: dict[str, Any]) -> dict[str, Any]:
    """Runs in a separate process."""
    from plaudit.config import RlRecipe, parse_recipe
    from plaudit.rl.loop import RlTraining
    from plaudit.train.run.run import Run

    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "sums.jsonl"
        rows = zip(given["texts"], given["answers"], strict=True)
        data.write_text("".join(json.dumps({"prompt": text, "answer": answer}) + "\n" for text, answer in rows))
        recipe = parse_recipe(
            {
                "task": "rl", "seed": given["seed"], "model": {"path": given["policy"]},
                "data": {"path": str(data), "eval_items": 1},
                "reward": given["reward"], "engine": {"kv_bytes": 1 << 27},
                "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
                "train": {
                    "steps": given["steps"], "prompts_per_step": given["prompts"],
                    "samples_per_prompt": given["samples"], "lr": given["lr"], "betas": [0.9, 0.95], "clip_norm": 1.0,
                    "threads": given["threads"], "eval_every": 10**6, "checkpoint": {"every": 10**6},
                },
                "sampling": {"max_tokens": given["max_tokens"]},
            },
            "benchmark",
        )  # fmt: skip
        assert isinstance(recipe, RlRecipe)
        watch = Watch(given)
        with Run(Path(place) / "run", recipe) as run:
            training = RlTraining(recipe, run, watch)
            watch.module = training.loaded.module
            with suppress(Reached):
                training.fit()
    used = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"steps": watch.steps, "accuracy": watch.accuracy, "peak_rss": sum(used)}


def ask(command: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Starts a trainer with its work as JSON and returns the last line it prints."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(given["threads"]), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    }  # fmt: skip
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def summarise(given: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    steps = found["steps"][given["warmup"] :]
    split = {name: statistics.median(step[name] for step in steps) for name in ("step", "cpu", "generate", "reward")}
    split["rest"] = split["step"] - split["generate"] - split["reward"]
    reached = [[step, seconds] for step, seconds, right in found["accuracy"] if right >= given["target"]]
    return {
        "samples_per_second": given["prompts"] * given["samples"] / split["step"],
        "seconds": {name: round(value, 4) for name, value in split.items()},
        "peak_mib": round(found["peak_rss"] / 2**20),
        "accuracy": found["accuracy"],
        "reached": reached[0] if reached else None,
    }


def measure(part: str, quick: bool, seeds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        save_llama(Path(place) / "llama")
        given = work(part, quick, Path(place))
        for seed in range(1, 1 + (seeds if part == "accuracy" else 1)):
            texts = prompts(part, given["prompts"] * given["steps"] + 10, seed)
            for threads in (1, 2):
                for side in SIDES:
                    print(f"{part}: {side}, {threads} threads, seed {seed}", file=sys.stderr, flush=True)
                    request = {**given, **texts, "threads": threads, "seed": seed}
                    row = summarise(given, ask(SIDES[side], request))
                    rows.append({"part": part, "side": side, "threads": threads, "seed": seed, **row})
                    print(f"  {row['samples_per_second']:.1f} samples/s, reached {row['reached']}", file=sys.stderr)
    return rows


def best(rows: list[dict[str, Any]], part: str, side: str) -> list[dict[str, Any]]:
    """The rows of the thread count that is better over all seeds: by speed, or by time to the target."""
    of = [row for row in rows if row["part"] == part and row["side"] == side]
    by = {n: [row for row in of if row["threads"] == n] for n in {row["threads"] for row in of}}

    def cost(chosen: list[dict[str, Any]]) -> float:
        if part == "throughput":
            return -statistics.median(row["samples_per_second"] for row in chosen)
        return statistics.median(row["reached"][1] if row["reached"] else float("inf") for row in chosen)

    return min(by.values(), key=cost) if by else []


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table(
        "part",
        "side",
        "threads",
        "seed",
        "samples/s",
        "step s",
        "CPU s",
        "generate",
        "reward",
        "rest",
        "MiB",
        "reached",
    )
    for row in rows:
        reached = "-" if row["reached"] is None else f"step {row['reached'][0]}, {row['reached'][1]:.1f} s"
        seconds = [f"{row['seconds'][name]:.3f}" for name in ("step", "cpu", "generate", "reward", "rest")]
        table.add_row(
            row["part"], row["side"], str(row["threads"]), str(row["seed"]), f"{row['samples_per_second']:.1f}",
            *seconds, str(row["peak_mib"]), reached,
        )  # fmt: skip
    console.print(table)
    for name, part, key in (("samples/s", "throughput", "speed"), ("time to accuracy", "accuracy", "reached")):
        ours, theirs = best(rows, part, "plaudit"), best(rows, part, "trl")
        if not ours or not theirs:
            continue
        if key == "speed":
            ratio = statistics.median(r["samples_per_second"] for r in ours)
            ratio /= statistics.median(r["samples_per_second"] for r in theirs)
            colour = "green" if ratio >= AIM else "red"
            console.print(f"{name}: [{colour}]{ratio:.2f}x[/] TRL's (aim {AIM}x)")
        elif all(row["reached"] for row in [*ours, *theirs]):
            times = [statistics.median(row["reached"][1] for row in side) for side in (ours, theirs)]
            colour = "green" if times[0] < times[1] else "red"
            console.print(f"{name} {TARGET}: [{colour}]{times[0]:.1f} s[/] against {times[1]:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps as a smoke test; writes no results")
    parser.add_argument("--only", choices=["throughput", "accuracy"])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the accuracy part")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.side:
        print(json.dumps(run_plaudit(json.load(sys.stdin))))
        return
    if not TRL_PYTHON.exists():
        raise SystemExit("TRL is not installed; run: make .venv-interop/.installed")
    rows: list[dict[str, Any]] = []
    for part in ("throughput", "accuracy"):
        if options.only in (None, part):
            rows += measure(part, options.quick, 1 if options.quick else options.seeds)
    show(rows)
    if options.quick or options.only:
        return
    from stamp import processor, stamp, versions

    trl = versions(TRL_PYTHON, ["trl"])["trl"], "GRPOTrainer, generation by transformers, float32, 1 and 2 threads"
    record = {
        **stamp(__file__, processor(), {"trl": trl}), "transformers": version("transformers"), "target": TARGET,
        "rows": rows,
    }  # fmt: skip
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
