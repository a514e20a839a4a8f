"""DPO and on-policy distillation compared with TRL's trainers, in one run on one machine: loss curves and speed.

    python benchmarks/methods_vs_trl.py [--only dpo|distill] [--steps 20]

    dpo      both compute the reference's log-probs before the first step. On the package's policy with pairs of its own
             responses, 32 per step, and on a random Llama of 6.9M parameters (6 layers, 256 wide, vocabulary 8,192)
             with prompts of 64 tokens and responses of 16 to 64, 8 pairs per step
    distill  the full reverse KL to a teacher on the policy's own samples, 128 prompts per step, at most 96 tokens: on
             the package's policy, with a copy of it with perturbed weights as the teacher
Curves: both sides learn from the same rows in the same order; TRL's distillation receives our samples, because its own
would differ. Speed: the median step after warm-up, each side sampling for itself, with the better of 1 and 2 threads,
and the CPU seconds of a step on one thread, which other load on the machine does not increase; one trainer at a time,
in a separate process. Learning rate, AdamW, betas and clipping are the same. Writes
benchmarks/results/methods_vs_trl.json, unless only a part was run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rl_vs_trl import ask, save_llama

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "methods_vs_trl.json"
TRL_PYTHON = ROOT / ".venv-interop" / "bin" / "python"
SIDES = {
    "plaudit": [sys.executable, __file__, "--side"],
    "trl": [str(TRL_PYTHON), str(ROOT / "benchmarks" / "rivals" / "trl_methods.py")],
}
AIM, CURVE = 1.5, 1e-4
WARMUP = 4
BATCH = {("dpo", "sums"): 32, ("dpo", "llama"): 8, ("distill", "sums"): 128}
RATE = {"dpo": 1e-4, "distill": 3e-4}


def sums_pairs(count: int) -> list[dict[str, str]]:
    """Pairs from the package's policy: a right response over a wrong one, as `plaudit train sums-dpo` makes them."""
    from plaudit.config import PreferenceRecipe, parse_recipe
    from plaudit.models import load_policy
    from plaudit.train.data.rows import read_rows
    from plaudit.train.supervised.preference_data import FOLDER, ROWS, write_samples

    data = {"world": "sums", "problems": count, "samples": 8}
    tables = {
        "model": {"path": "sums-policy"},
        "algorithm": {"name": "dpo"},
        "train": {"steps": 1, "lr": 1, "batch": 1},
    }
    recipe = parse_recipe({"task": "preference", "data": data, **tables}, "pairs")
    assert isinstance(recipe, PreferenceRecipe)
    with tempfile.TemporaryDirectory() as place:
        write_samples(recipe, Path(place), load_policy("sums-policy", "float32", "cpu"))
        rows = read_rows(Path(place) / FOLDER / ROWS)[:count]
    return [{name: row.text(name) for name in ("prompt", "chosen", "rejected")} for row in rows]


def word_pairs(count: int) -> list[dict[str, str]]:
    draw = random.Random(1)

    def words(least: int, most: int) -> str:
        # None starts like w0, w1 or w2, the special tokens, which would otherwise be matched inside it.
        return " ".join(f"w{draw.randrange(3000, 8192)}" for _ in range(draw.randint(least, most)))

    # A separating space, because TRL reads prompt and response as one text.
    return [{"prompt": words(64, 64) + " ", "chosen": words(16, 64), "rejected": words(16, 64)} for _ in range(count)]


def disturbed_teacher(directory: Path) -> None:
    import torch

    from plaudit.models import load_policy, save

    loaded = load_policy("sums-policy", "float32", "cpu")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=draw))
    save(loaded.module, loaded.tokenizer, directory)


def work(method: str, model: str, steps: int, folder: Path) -> dict[str, Any]:
    policy = ROOT / "plaudit" / "embedded" / "sums-policy" if model == "sums" else folder / "llama"
    given: dict[str, Any] = {
        "method": method, "policy": str(policy), "steps": steps, "batch": BATCH[method, model], "lr": RATE[method],
        "max_tokens": 96, "teacher": str(folder / "teacher"), "samples": None,
    }  # fmt: skip
    count = steps * given["batch"]
    if method == "dpo":
        rows = sums_pairs(count + 8) if model == "sums" else word_pairs(count + 8)
        return {**given, "rows": rows[:count], "heldout": rows[count:]}
    from plaudit.config.supervised import SumsTable
    from plaudit.worlds import get_world

    world = get_world("sums", 1, SumsTable())
    return {**given, "rows": [{"prompt": world.problem("train", i).prompt} for i in range(count)]}


class Watch:
    """Records the loss and the seconds of each step, in either training loop."""

    def __init__(self, loss: str) -> None:
        self.loss = loss
        self.losses: list[float] = []
        self.steps: list[dict[str, float]] = []
        self._begin()

    def _begin(self) -> None:
        self.begin = {"wall": time.perf_counter(), "cpu": time.process_time()}

    def bar(self, done: int, total: int) -> AbstractContextManager[None]:
        self._begin()
        return nullcontext()

    def figures(self, step: int, figures: dict[str, float]) -> None:
        self._begin()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        now = {"wall": time.perf_counter(), "cpu": time.process_time()}
        self.steps.append({name: now[name] - self.begin[name] for name in now})
        self.losses.append(metrics[self.loss])
        self._begin()

    def warn(self, message: str) -> None:
        print(message, file=sys.stderr)

    note = warn


def run_plaudit(given: dict[str, Any]) -> dict[str, Any]:
    """Runs in a separate process; returns losses, step seconds, and the rows or samples in the order of training."""
    from plaudit.config import PreferenceRecipe, RlRecipe, parse_recipe
    from plaudit.rl.loop import RlTraining
    from plaudit.train.data.rows import FileRows
    from plaudit.train.rollouts.dump import Dump
    from plaudit.train.run.run import Run
    from plaudit.train.supervised.supervised import SupervisedTraining

    train = {
        "steps": given["steps"], "lr": given["lr"], "betas": [0.9, 0.95], "clip_norm": 1.0, "threads": given["threads"],
        "schedule": "constant", "warmup": 0, "eval_every": 10**6, "checkpoint": {"every": 10**6},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        files = {name: Path(place) / f"{name}.jsonl" for name in ("rows", "heldout")}
        for name, path in files.items():
            path.write_text("".join(json.dumps(row) + "\n" for row in given.get(name, given["rows"][:1])))
        data = {"path": str(files["rows"]), "eval_path": str(files["heldout"])}
        common = {"seed": 1, "model": {"path": given["policy"]}, "data": data}
        if given["method"] == "dpo":
            table = {**common, "task": "preference", "algorithm": {"name": "dpo", "beta": 0.1}}
            recipe = parse_recipe({**table, "train": {**train, "batch": given["batch"]}}, "dpo")
            assert isinstance(recipe, PreferenceRecipe)
            watch = Watch("loss")
            with Run(Path(place) / "run", recipe) as run:
                SupervisedTraining(recipe, run, watch).fit()  # type: ignore[arg-type]
            rows = FileRows(recipe.data, recipe.seed)
            order = [rows.train(i) for i in range(given["steps"] * given["batch"])]
            learned: Any = [{name: row.text(name) for name in ("prompt", "chosen", "rejected")} for row in order]
        else:
            from plaudit.models import load_tokenizer

            teacher = {"path": given["teacher"], "top_k": len(load_tokenizer(given["policy"]))}
            recipe = parse_recipe(
                {
                    **common, "task": "rl", "algorithm": {"name": "distill", "teachers": {"other": teacher}},
                    "sampling": {"max_tokens": given["max_tokens"]},
                    "train": {**train, "prompts_per_step": given["batch"], "dump": given["samples"] is not None},
                }, "distill",
            )  # fmt: skip
            assert isinstance(recipe, RlRecipe)
            watch = Watch("teacher/kl_top_k")
            with Run(Path(place) / "run", recipe) as run:
                RlTraining(recipe, run, watch).fit()  # type: ignore[arg-type]
            dump = Dump(Path(place) / "run" / "rollouts")
            learned = [[[s.prompt_ids, s.token_ids] for s in dump.read(step)[0]] for step in dump.steps()]
    return {"losses": watch.losses, "steps": watch.steps, "learned": learned}


def curves(given: dict[str, Any]) -> dict[str, Any]:
    """Both sides learn from the rows that ours used."""
    given = {**given, "threads": 1, "samples": []}
    ours = ask(SIDES["plaudit"], given)
    same = {"rows": ours["learned"]} if given["method"] == "dpo" else {"samples": ours["learned"]}
    theirs = ask(SIDES["trl"], {**given, **same})
    apart = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return {"losses": {"plaudit": ours["losses"], "trl": theirs["losses"]}, "apart": apart}


def measure(method: str, model: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        save_llama(Path(place) / "llama")
        disturbed_teacher(Path(place) / "teacher")
        given = work(method, model, steps, Path(place))
        row = {"method": method, "model": model, **curves(given)}
        wall: dict[str, dict[int, float]] = {side: {} for side in SIDES}
        cpu: dict[str, float] = {}
        for threads in (1, 2):
            for side in SIDES:
                print(f"{method}, {model}: {side}, {threads} threads", file=sys.stderr, flush=True)
                took = ask(SIDES[side], {**given, "threads": threads, "samples": None})["steps"][WARMUP:]
                wall[side][threads] = round(statistics.median(step["wall"] for step in took), 4)
                if threads == 1:
                    cpu[side] = round(statistics.median(step["cpu"] for step in took), 4)
        best = {side: min(wall[side].values()) for side in SIDES}
        ratio = {"wall": round(best["trl"] / best["plaudit"], 2), "cpu": round(cpu["trl"] / cpu["plaudit"], 2)}
        return {**row, "seconds": wall, "cpu_seconds": cpu, "ratio": ratio}


def main() -> None:
    if sys.argv[1:] == ["--side"]:
        print("\n" + json.dumps(run_plaudit(json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(RATE))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for method, model in BATCH:
        if options.only in (None, method):
            rows.append(row := measure(method, model, options.steps))
            print(f"{method:8} {model:6} curves apart {row['apart']:.1e} (aim {CURVE:.0e}), a step {row['seconds']}")
            print(f"    CPU seconds {row['cpu_seconds']}, {row['ratio']} times as fast (aim {AIM})", flush=True)
    if options.only is None and options.steps == 20:
        from stamp import processor, stamp, versions

        trl = versions(TRL_PYTHON, ["trl", "transformers"])
        settings = f"DPOTrainer with precompute_ref_log_probs, DistillationTrainer; transformers {trl['transformers']}"
        result = {**stamp(__file__, processor(), {"trl": (trl["trl"], settings)}), "aim": AIM, "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
