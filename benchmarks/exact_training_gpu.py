"""Whole training runs on one GPU in bf16: do engine and learner stay equal to the bit, and is a run the same twice?

    python benchmarks/exact_training_gpu.py [--cases smollm2-grpo,placements,...] [--steps N] [--out FILE]

smollm2-grpo   the shipped recipe, 100 steps; then the same again from its seed
smollm2-ppo    the same task by PPO with a critic and four minibatches a step, 20 steps
placements     GRPO of a random Llama of 1B, 64 × (128 → 256), 5 steps in each placement of one process
free           smollm2-grpo with train.deterministic = false, for what determinism costs

Each run's largest and mean mismatch, the share of its steps without any, seconds a step by phase, and the hash of its
last weights. Adds to the result file, case by case.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from stamp import stamp

import plaudit
from plaudit.events import read_events

CRITIC = {"algorithm.name": "ppo", "critic.lr": 1e-5, "train.minibatches": 4, "train.samples_per_prompt": 4}
PHASES = ("generate", "old", "update", "critic", "step")


def right(prompt: str, response: str, truth: dict[str, Any]) -> float:
    match = re.search(r"([A-Z][A-Za-z\-]+)[.\s]*$", response)
    return float(match is not None and match.group(1) == truth["item"]["answer"])


def even(prompt: str, response: str, truth: str) -> float:
    """A reward for random weights: the share of words with an even number."""
    numbers = [int(word[1:]) for word in response.split() if word[1:].isdigit()]
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))


def figures(directory: Path) -> dict[str, Any]:
    steps, weights = [], ""
    for event in read_events(directory):
        if event["kind"] == "metric" and "time/step" in event["values"]:
            steps.append(event["values"])
        if event["kind"] == "proof":
            weights = event["hashes"]["weights"]
    apart = [step["mismatch/abs_max"] for step in steps]
    late = steps[len(steps) // 2 :]  # the first steps compile kernels
    seconds = {p: sum(s.get(f"time/{p}", 0.0) for s in late) / len(late) for p in PHASES}
    return {
        "steps": len(steps), "exact_steps": sum(each == 0 for each in apart), "mismatch_max": max(apart),
        "mismatch_mean": max(step["mismatch/abs_mean"] for step in steps), "seconds": seconds,
        "reward": [round(step["reward/mean"], 3) for step in (steps[0], steps[-1])], "weights": weights,
    }  # fmt: skip


def smollm2(out: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    both = {"train.dump": True, "train.eval_every": 1000, "train.checkpoint.every": 25, **options}
    plaudit.train("smollm2-grpo", reward=right, steps=steps, out=out, fresh=True, options=both, quiet=True)
    return figures(out)


def placed(out: Path, models: Path, placement: str, steps: int) -> dict[str, Any]:
    recipe = {
        "task": "rl", "seed": 1, "model": {"path": str(models / "policy"), "device": "cuda", "dtype": "bfloat16"},
        "data": {"path": str(models / "prompts.jsonl")},
        "algorithm": {"name": "grpo"}, "placement": {"name": placement},
        "train": {"steps": steps, "prompts_per_step": 8, "samples_per_prompt": 8, "lr": 1e-6, "warmup": 1,
                  "minibatches": 2, "micro_batch_tokens": 32768, "eval_every": 1000, "checkpoint": {"every": 1000}},
        "sampling": {"max_tokens": 256},
    }  # fmt: skip
    plaudit.train(recipe, reward=even, out=out, fresh=True, quiet=True)
    return figures(out)


def make_model(directory: Path) -> None:
    from swapped_gpu import BIG, make_models

    make_models(directory, BIG, "cuda")
    chance = random.Random(1)
    lines = [" ".join(f"w{chance.randrange(3, 32_000)}" for _ in range(128)) for _ in range(100)]
    text = "\n".join(json.dumps({"prompt": line, "answer": ""}) for line in lines)
    (directory / "prompts.jsonl").write_text(text + "\n")


def cases(chosen: list[str], root: Path, steps: int | None) -> dict[str, Any]:
    """What each case does, in order."""
    works: dict[str, Any] = {}
    if "smollm2-grpo" in chosen:
        works["smollm2-grpo"] = lambda: smollm2(root / "grpo", steps or 100, {})
        works["smollm2-grpo again"] = lambda: smollm2(root / "again", steps or 100, {})
    if "free" in chosen:
        works["smollm2-grpo free"] = lambda: smollm2(root / "free", steps or 100, {"train.deterministic": False})
    if "smollm2-ppo" in chosen:
        works["smollm2-ppo"] = lambda: smollm2(root / "ppo", steps or 20, CRITIC)
    if "placements" in chosen:
        make_model(root / "models")
        for name in ("colocated", "swapped", "hybrid"):
            works[f"1B {name}"] = lambda name=name: placed(root / name, root / "models", name, steps or 5)
    return works


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="smollm2-grpo,smollm2-ppo,placements,free")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=Path, help="keep the runs here")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_training_gpu.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("exact_training_gpu: no CUDA device here; skipped")
        return
    kept = json.loads(arguments.out.read_text())["results"] if arguments.out.is_file() else {}
    table = Table(title=torch.cuda.get_device_name())
    for heading in ("run", "steps", "exact", "mismatch max", "s/step", "old", "update", "reward", "weights"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.runs or Path(scratch)
        for name, work in cases(arguments.cases.split(","), root, arguments.steps).items():
            begin = time.monotonic()
            row = kept[name] = work() | {"wall": round(time.monotonic() - begin, 1)}
            times = row["seconds"]
            table.add_row(
                name, str(row["steps"]), str(row["exact_steps"]), f"{row['mismatch_max']:.1e}", f"{times['step']:.3f}",
                f"{times['old']:.3f}", f"{times['update']:.3f}", "{} → {}".format(*row["reward"]), row["weights"][:12],
            )  # fmt: skip
            arguments.out.write_text(
                json.dumps({**stamp(__file__, torch.cuda.get_device_name(), {}), "results": kept}, indent=1) + "\n"
            )
            torch.cuda.empty_cache()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
