"""Full-weight GRPO of an 8B model on one GPU, compared with its plan: seconds, memory, share of the card's product
rate.

    python benchmarks/large_gpu.py [--steps 3] [--size 8B] [--out FILE]

The shipped recipe llama8b-grpo with a random Llama of that shape instead of the checkpoint, and prompts of words: 64
prompts of 256 tokens, 8 responses of up to 512 tokens each. Nothing is downloaded. Needs 60 GB of disk and 128 GB of
host memory. Every response of a random model fails the rule; zero gradients take as much work as any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from planner_gpu import ROOT, make_model, measured, write_prompts
from stamp import stamp

sys.path.insert(0, str(ROOT))

import plaudit
from plaudit.config.recipe import load_recipe
from plaudit.config.rl import RlRecipe
from plaudit.models.catalog import resolve
from plaudit.plan import Constants
from plaudit.plan.cost.prediction import predict
from plaudit.plan.recipes import layout_of, workload_of
from plaudit.plan.shape.hardware import Overrides, cluster

VOCABULARY = 128_256
SHAPES = {
    "8B": (4096, 32, 32, 8, 14336, False, 0),
    "1B": (2048, 16, 32, 8, 8192, True, 0),
    "tiny": (64, 2, 4, 2, 128, True, 0),
}
RECIPE = ROOT / "plaudit" / "recipes" / "llama8b-grpo.toml"


def recipe_of(here: Path, steps: int, size: str) -> dict[str, Any]:
    tree = load_recipe(RECIPE).model_dump(exclude_unset=True)
    tree["model"]["path"] = str(here / "model")
    tree["data"] = {"path": str(here / "prompts.jsonl"), "eval_items": 2}
    tree["reward"] = {"rule": "exact", "answer": r"(w\d+)$"}
    tree["train"] |= {"steps": steps, "eval_every": 1000, "checkpoint": {"every": 1000}, "show": 0}
    if size == "tiny":
        tree["model"] |= {"device": "cpu"}
        tree["train"] |= {"prompts_per_step": 4, "micro_batch_tokens": 2048}
        tree["engine"], tree["sampling"] = {"kv_bytes": 1 << 26}, {"max_tokens": 16}
    return tree


def product_rate() -> float:
    """FLOP/s of one large product."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    begin = time.monotonic()
    for _ in range(50):
        left @ right
    torch.cuda.synchronize()
    return 50 * 2 * 8192**3 / (time.monotonic() - begin)


def planned(recipe: RlRecipe, prompt: float, response: float) -> dict[str, Any]:
    machine = json.loads((ROOT / "benchmarks/results/planner_gpu.json").read_text())["machine"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(machine)
        file.flush()
        own = Overrides.read(Path(file.name))
    place, constants = cluster("1x1xthis-machine", own), Constants().changed(own.constants)
    work = workload_of(recipe, resolve, prompt, response)
    plan = predict(work, place, "colocated", training=layout_of(recipe, work), constants=constants)
    return {
        "step": plan.step.value, "peak": plan.peak.value - constants.reserve_bytes,
        "phases": {phase.name: phase.seconds.value for phase in plan.phases},
        "memory": {phase.name: {part.name: part.value for part in phase.memory.parts} for phase in plan.phases},
        "shortages": [str(shortage) for shortage in plan.shortages],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--size", choices=SHAPES, default="8B")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/large_gpu.json")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and options.size != "tiny":
        print("large_gpu: no CUDA device here; skipped")
        return
    vocabulary = 200 if options.size == "tiny" else VOCABULARY
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        began = time.monotonic()
        make_model(here / "model", SHAPES[options.size], vocabulary, "cuda" if on_gpu else "cpu")
        write_prompts(here / "prompts.jsonl", 600, 256, vocabulary)
        rate = product_rate() if on_gpu else 1.0
        if on_gpu:
            torch.cuda.empty_cache()
        print(f"model made in {time.monotonic() - began:.0f} s; products {rate / 1e12:.0f} TFLOP/s", flush=True)
        tree = recipe_of(here, options.steps, options.size)
        run = plaudit.train(tree, out=here / "run", fresh=True)
        seen = measured(here / "run")
        recipe = load_recipe(here / "run" / "recipe.toml")
        assert isinstance(recipe, RlRecipe)
        plan = planned(recipe, seen["length/prompt_mean"], seen["length/mean"])
        weights = run.summary["parameters"]
    # A prompt is computed once for all its samples; an embedding look-up is not a product.
    hidden = SHAPES[options.size][0]
    tokens = recipe.train.prompts_per_step * (
        seen["length/prompt_mean"] + recipe.train.samples_per_prompt * seen["length/mean"]
    )
    products = 2 * (weights - vocabulary * hidden) * tokens
    update = seen["time/update"]
    shares = {"recomputed products counted": 4 * products / update / rate, "without": 3 * products / update / rate}
    print(f"step {seen['time/step']:.1f} s (plan {plan['step']:.1f}), peak {seen['peak'] / 1e9:.1f} GB "
          f"(plan {plan['peak'] / 1e9:.1f}), update {update:.1f} s, share of the product rate {shares}")  # fmt: skip
    result = {"size": options.size, "parameters": weights, "tokens": tokens, "product_rate": rate, "shares": shares,
              "measured": seen, "planned": plan}  # fmt: skip
    machine = torch.cuda.get_device_name() if on_gpu else "cpu"
    options.out.write_text(json.dumps({**stamp(__file__, machine, {}), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
