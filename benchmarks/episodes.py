"""Episodes with a slow tool: each episode continues when its tool answers, compared with all turns in lockstep.

    python benchmarks/episodes.py [--quick] [--repeats 3]

64 episodes of the recipe sums-tool (its policy, its data, a calculator), one thread, and a calculator that takes 0.5 s:
always, or on average (0.25 s, and one call in eight 2.25 s; the same calls are slow for all sides). The lower bound is
generation, which is the wall time with a calculator that answers immediately, plus the longest chain of tool calls in
an episode. Medians of the repeats, with sides alternating. Writes benchmarks/results/episodes.json, unless --quick.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.stamp import processor, stamp  # noqa: E402
from plaudit.config import RlRecipe, load_recipe  # noqa: E402
from plaudit.core import Engine  # noqa: E402
from plaudit.models import load_policy  # noqa: E402
from plaudit.records import Prompt, Turn  # noqa: E402
from plaudit.train.agents.episodes import Episodes  # noqa: E402
from plaudit.train.rollouts.sources import open_prompts  # noqa: E402
from plaudit.worlds.calculator import Calculator  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "episodes.json"
AIM = 1.3
PROMPTS, SAMPLES = 16, 4
SIDES: dict[str, dict[str, Any]] = {
    "lockstep, 8 threads": {"lockstep": True, "threads": 8},
    "lockstep, 64 threads": {"lockstep": True, "threads": 64},
    "as tools answer, 64 threads": {"lockstep": False, "threads": 64},
}


class SlowCalculator(Calculator):
    """`spent`: seconds that its episode has waited for this tool."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.spent = 0.0

    def reset(self, prompt: Prompt) -> None:
        self.prompt = prompt.text

    def step(self, response: str) -> Turn:
        seconds = {"0.5 s": 0.5, "0.5 s on average": self._uneven(response), "none": 0.0}[self.kind]
        time.sleep(seconds)
        self.spent += seconds
        return super().step(response)

    def _uneven(self, response: str) -> float:
        rare = hashlib.sha256(f"{self.prompt} {response}".encode()).digest()[0] < 32
        return 2.25 if rare else 0.25


def play(recipe: RlRecipe, options: dict[str, Any], kind: str) -> dict[str, float]:
    assert recipe.environment is not None
    loaded = load_policy("sums-policy", "float32", "cpu")
    engine = Engine(loaded.module, loaded.tokenizer)
    table = recipe.environment.model_copy(update=options)
    made: list[SlowCalculator] = []

    def make() -> SlowCalculator:
        made.append(SlowCalculator(kind))
        return made[-1]

    player = Episodes(
        engine, loaded.tokenizer, engine.decoder.max_positions, recipe.sampling, table, recipe.seed, make=make
    )
    prompts = open_prompts(recipe.data, loaded.tokenizer, recipe.seed).train(range(PROMPTS))
    begin = time.monotonic()
    samples = player.play(prompts, SAMPLES, "benchmark")
    wall = time.monotonic() - begin
    assert not any(sample.error for sample in samples)
    turns = sum(sample.extra["turns"] for sample in samples)
    return {"seconds": wall, "chain": max(each.spent for each in made), "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(Path("sums-tool"), [])
    assert isinstance(recipe, RlRecipe)
    repeats = 1 if args.quick else args.repeats
    play(recipe, SIDES["as tools answer, 64 threads"], "none")  # what is computed once
    kinds = ("0.5 s", "0.5 s on average")
    every: dict[str, dict[str, list[dict[str, float]]]] = {kind: {name: [] for name in SIDES} for kind in kinds}
    rows, alone = [], []
    for _ in range(repeats):
        for kind in kinds:
            alone.append(play(recipe, SIDES["lockstep, 64 threads"], "none")["seconds"])
            for name, options in SIDES.items():
                every[kind][name].append(play(recipe, options, kind))
    generation = statistics.median(alone)
    for kind, runs in every.items():
        for name, found in runs.items():
            seconds = statistics.median(run["seconds"] for run in found)
            chain = found[0]["chain"]
            row = {
                "tool": kind, "side": name, "seconds": seconds, "all": [run["seconds"] for run in found],
                "chain": chain, "generation": generation, "ratio": seconds / (generation + chain),
                "turns": found[0]["turns"],
            }  # fmt: skip
            rows.append(row)
            print(f"{kind:18} {name:28} {seconds:6.2f} s  {row['ratio']:.2f} of {generation:.2f} + {chain:.2f}")
    if not args.quick:
        result = {**stamp(__file__, processor(), {}), "episodes": PROMPTS * SAMPLES, "aim": AIM, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
