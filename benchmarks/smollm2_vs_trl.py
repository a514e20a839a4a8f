"""SmolLM2-135M learning the who-did-what task on one GPU, compared with TRL's GRPOTrainer: the same model, prompts,
rule, batch, loss and learning rate.

    python benchmarks/smollm2_vs_trl.py [--steps 20] [--target 0.6] [--limit 360] [--out FILE] [--set KEY=VALUE ...]

    throughput  samples per second over --steps steps, the first four left out on both sides
    time        seconds of training until the reward of the training samples, over five steps, is the target;
                TRL ends after --limit seconds and is then reported as "at least"
One trainer at a time, each in a separate process. --trl-python is the interpreter of TRL's environment. Writes
benchmarks/results/smollm2_vs_trl.json unless --out is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_vs_trl.json"
RECIPE = ROOT / "plaudit" / "recipes" / "smollm2-grpo.toml"
RIVAL = ROOT / "benchmarks" / "rivals" / "trl_smollm2.py"
WARMUP, WINDOW = 4, 5

Step = dict[str, float]


def ours(sets: list[str], steps: int, folder: Path) -> dict[str, Any]:
    words = [word for key in (*sets, f"train.steps={steps}", "train.eval_every=1000000") for word in ("--set", key)]
    run = folder / "run"
    command = [sys.executable, "-m", "plaudit", "train", str(RECIPE), "--fresh", "--out", str(run), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ})
    found: list[Step] = []
    at = 0.0
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        values = event.get("values", {})
        if event["kind"] == "metric" and "time/step" in values:
            at += values["time/step"]
            found.append({"seconds": values["time/step"], "at": at, "reward": values["reward/mean"]})
    summary = json.loads((run / "summary.json").read_text())
    return {"steps": found, "peak_bytes": summary["peak_bytes"]}


def theirs(python: str, given: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run([python, str(RIVAL)], input=json.dumps(given), capture_output=True, text=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{RIVAL.name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def question(recipe: Any, steps: int) -> dict[str, Any]:
    """The recipe's prompts and settings in the form that the other side takes."""
    from plaudit.models import load_tokenizer, resolve
    from plaudit.train.rollouts.sources import open_prompts

    prompts = open_prompts(recipe.data, load_tokenizer(recipe.model.path), recipe.seed)
    drawn = prompts.train(range(steps * recipe.train.prompts_per_step))
    return {
        "policy": str(resolve(recipe.model.path)), "seed": recipe.seed, "lr": recipe.train.lr,
        "warmup": recipe.train.warmup, "prompts": recipe.train.prompts_per_step,
        "samples": recipe.train.samples_per_prompt, "max_tokens": recipe.sampling.max_tokens,
        "temperature": recipe.sampling.temperature,
        "answer": recipe.reward.own["answer"], "messages": [list(prompt.extra["messages"]) for prompt in drawn],
        "answers": [prompt.truth["item"]["answer"] for prompt in drawn], "window": WINDOW,
    }  # fmt: skip


def reached(steps: list[Step], target: float) -> float | None:
    for index in range(WINDOW, len(steps) + 1):
        if sum(step["reward"] for step in steps[index - WINDOW : index]) / WINDOW >= target:
            return steps[index - 1]["at"]
    return None


def tell(name: str, found: dict[str, Any], options: argparse.Namespace, batch: int) -> None:
    """Adds the rate and when the target was reached, and prints them."""
    timed = found["steps"][WARMUP : options.steps]
    found["samples_per_second"] = batch / statistics.median(step["seconds"] for step in timed)
    found["reached"] = reached(found["steps"], options.target)
    print(f"{name:8} {found['samples_per_second']:8.0f} samples/s, peak {found['peak_bytes'] / 1e9:.1f} GB, "
          f"reward {options.target} after {found['reached'] or '-'} s, {len(found['steps'])} steps in "
          f"{found['steps'][-1]['at']:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--target", type=float, default=0.6)
    parser.add_argument("--limit", type=float, default=360.0, help="time limit in seconds for TRL to reach the target")
    parser.add_argument("--learn", type=int, default=0, help="our steps to the target; 0: throughput only")
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--trl-parts", type=int, default=1, help="gradient accumulation steps of TRL")
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-interop" / "bin" / "python"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import torch
    from stamp import stamp, versions

    from plaudit.config import load_recipe

    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device: SmolLM2 learns for hours on a CPU; see sums-grpo")
    recipe: Any = load_recipe(RECIPE, options.set)
    batch = recipe.train.prompts_per_step * recipe.train.samples_per_prompt
    how = f"GRPOTrainer, generation by transformers, bf16 on float32 weights, update in {options.trl_parts} parts"
    trl = versions(options.trl_python, ["trl"])["trl"], how
    record: dict[str, Any] = {
        **stamp(__file__, torch.cuda.get_device_name(), {"trl": trl}), "transformers": version("transformers"),
        "set": options.set, "batch": batch, "target": options.target,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        mine = ours(options.set, max(options.steps, options.learn), Path(place))
        tell("plaudit", mine, options, batch)
        # TRL takes more than two seconds per step; after the last prompt it starts again with the first.
        prompts_for = max(options.steps, int(options.limit / 2)) if options.learn else options.steps
        request = {
            **question(recipe, prompts_for),
            "steps": 5000 if options.learn else options.steps,
            "target": options.target if options.learn else 2.0,
            "limit": options.limit,
            "parts": options.trl_parts,
        }
        other = theirs(options.trl_python, request)
    tell("trl", other, options, batch)
    ratio = mine["samples_per_second"] / other["samples_per_second"]
    print(f"throughput: {ratio:.2f}x TRL's")
    if mine["reached"]:
        most = other["reached"] or other["steps"][-1]["at"]
        print(f"time to {options.target}: {'' if other['reached'] else 'at least '}{most / mine['reached']:.1f}x less")
    options.out.write_text(json.dumps({**record, "plaudit": mine, "trl": other}, indent=1) + "\n")


if __name__ == "__main__":
    main()
