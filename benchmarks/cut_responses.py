"""PPO with half of the responses truncated: what the policy learns, and which returns the critic predicts.

    python benchmarks/cut_responses.py [--seeds 2] [--set a.b=c …]

    sums      the recipe sums-ppo with a rule in place of the server, max_tokens = 26, 60 steps: held-out accuracy
              before and after, of 128 problems × 4 samples, and the mean return, which cannot exceed 1 with rewards of
              0 or 1. `fits` is the share of those problems whose written solution is at most 26 tokens long
    constant  every response truncated after 8 tokens and rewarded with 1: the mean return must be 1 at every step
Everything else is the recipe's setting or the default; `--set` changes it for both. Writes
benchmarks/results/cut_responses.json, unless --set is used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe, parse_recipe
from plaudit.config.shipped.catalog import find_recipe
from plaudit.config.table import apply, read_toml
from plaudit.rl.follower import NoViewer
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from plaudit.worlds.sums import Sums

RESULTS = Path(__file__).resolve().parent / "results" / "cut_responses.json"
AIM = 0.60
PROBLEMS = 128
LENGTHS = {"sums": 26, "constant": 8}
REWARDS: dict[str, dict[str, str]] = {
    "sums": {"rule": "exact", "answer": r"#(\d+)$"},
    "constant": {"rule": "function", "function": f"{__file__}:one"},
}


def one(prompt: str, response: str, truth: object) -> float:
    return 1.0


class Watch(NoViewer):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def step(self, step: int, metrics: Any) -> None:
        self.seen.append(dict(metrics))


def recipe(part: str, seed: int, sets: Sequence[str]) -> RlRecipe:
    tree = read_toml(find_recipe(Path("sums-ppo")))
    tree |= {"seed": seed, "reward": REWARDS[part], "sampling": {"max_tokens": LENGTHS[part]}}
    tree["train"] |= {"steps": 60, "eval_every": 600, "checkpoint": {"every": 600}, "show": 0, "eval_samples": 4}
    tree["data"]["eval_items"] = PROBLEMS
    if part == "constant":
        tree["train"]["prompts_per_step"] = 32
    for override in sets:
        apply(tree, override)
    parsed = parse_recipe(tree, f"cut responses: {part}")
    assert isinstance(parsed, RlRecipe)
    return parsed


def measured(part: str, seed: int, sets: Sequence[str] = ()) -> dict[str, Any]:
    tree, watch = recipe(part, seed, sets), Watch()
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder), tree) as run:
        summary = RlTraining(tree, run, watch).fit()
    steps = watch.seen
    problems = Sums(tree.data.sums, seed).heldout(PROBLEMS)
    return {
        "part": part, "seed": seed, "steps": len(steps),
        "fits": sum(len(problem.solution) <= tree.sampling.max_tokens for problem in problems) / len(problems),
        "cut": [round(steps[at]["length/truncated"], 3) for at in (0, -1)],
        "accuracy": [summary["accuracy_before"], summary["accuracy_after"]],
        "return": [round(step["return/mean"], 4) for step in (steps[0], steps[len(steps) // 2], steps[-1])],
        "value": [round(step["value/mean"], 4) for step in (steps[0], steps[len(steps) // 2], steps[-1])],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--part", choices=list(REWARDS))
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="a.b=c")
    options = parser.parse_args()
    rows = []
    for part in [options.part] if options.part else REWARDS:
        for seed in range(1, options.seeds + 1):
            rows.append(measured(part, seed, options.sets))
            print(json.dumps(rows[-1]), flush=True)
    worst = min((row["accuracy"][1] for row in rows if row["part"] == "sums"), default=None)
    if worst is not None:
        print(f"sums: at least {worst:.3f} of the held-out answers are right; the aim is {AIM}")
    if not options.sets and options.part is None:
        from stamp import processor, stamp

        result = {**stamp(__file__, processor(), {}), "aim": AIM, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
