"""Whole training runs on one GPU in bf16: do engine and learner stay bit-identical, and is a repeated run identical?

    python benchmarks/exact_training_gpu.py [--cases smollm2-grpo,placements,...] [--steps N] [--out FILE]

smollm2-grpo   the shipped recipe, 100 steps; then repeated with the same seed
smollm2-ppo    the same task by PPO with a critic and four minibatches per step, 20 steps
placements     GRPO of a random Llama of 1B, 64 × (128 → 256), 5 steps in each placement of one process
shapes         the same, colocated, of Qwen3, Mistral (a window of 128) and Gemma 2 (windows and soft caps) shapes
kinds          the same of the Llama: PPO with a critic, layers recomputed with the optimizer on the host, and without
               deterministic updates
lora           the same of the Llama with LoRA adapters, and 3 steps of one of 8B
mixture        20 steps of the shape of Qwen3-30B-A3B with LoRA adapters, 32 × (128 → 128)
async          the same of the Llama, rollouts in a separate process on the same GPU, at staleness 0
seeds          smollm2-grpo with three seeds, 100 steps: as shipped, and with a learner on transformers' and torch's own
               kernels, whose log-probs differ from the engine's; steps to a reward of 0.75 and 0.95. Six runs at once
stale          the same by the async placement at staleness 0 and 4. Six runs at once
verify         the colocated run again with dumps, and the result of `plaudit verify`
changed        five steps of smollm2-grpo, the result of `plaudit verify` on them, and on copies in which a weight is
               changed by one unit in the last place, or a reward or the seed is changed
free           smollm2-grpo with train.deterministic = false, to measure the cost of determinism

Reports each run's largest and mean mismatch, the share of its steps without any, seconds per step by phase, and the
hash of its final weights. Results are added to the result file after each case.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from stamp import stamp

import plaudit
from plaudit.core.model import fused, varlen
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
        if event["kind"] == "proof" and "weights" in event["hashes"]:
            weights = event["hashes"]["weights"]
    apart = [step["mismatch/abs_max"] for step in steps]
    late = steps[len(steps) // 2 :]  # the first steps compile kernels
    seconds = {p: sum(s.get(f"time/{p}", 0.0) for s in late) / len(late) for p in PHASES}
    return {
        "steps": len(steps), "exact_steps": sum(each == 0 for each in apart), "mismatch_max": max(apart),
        "mismatch_mean": max(step["mismatch/abs_mean"] for step in steps), "seconds": seconds,
        "reward": [round(step["reward/mean"], 3) for step in (steps[0], steps[-1])], "weights": weights,
    }  # fmt: skip


def reached(directory: Path) -> dict[str, int | None]:
    """The first step whose mean reward reaches this value."""
    rewards = [e["values"]["reward/mean"] for e in read_events(directory) if "reward/mean" in e.get("values", {})]
    return {
        str(level): next((step for step, value in enumerate(rewards, 1) if value >= level), None)
        for level in (0.75, 0.95)
    }


SEEDED = {  # a run of smollm2-grpo: its overrides, and whether its learner's bits differ from the engine's
    "smollm2-grpo": ({}, False),
    "smollm2-grpo, learner apart": ({}, True),
    "smollm2-grpo, async at staleness 0": ({"placement.staleness": 0}, False),
    "smollm2-grpo, async at staleness 4": ({"placement.staleness": 4}, False),
}


def seeds(root: Path, steps: int, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Three seeds of each kind, all at once, each in a separate process."""
    runs: dict[str, dict[Path, subprocess.Popen[bytes]]] = {kind: {} for kind in kinds}
    for kind in kinds:
        for seed in (1, 2, 3):
            out = root / f"{list(SEEDED).index(kind)}-{seed}"
            command = [sys.executable, __file__, "--child", str(out), "--kind", kind, "--seed", str(seed)]
            runs[kind][out] = subprocess.Popen([*command, "--steps", str(steps)])
    results = {}
    for kind, processes in runs.items():
        failed = [out.name for out, process in processes.items() if process.wait(timeout=560)]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed")
        rows = [figures(out) | {"reached": reached(out)} for out in processes]
        whole = {key: rows[0][key] for key in ("steps", "seconds", "reward", "weights")}
        whole |= {"exact_steps": min(row["exact_steps"] for row in rows), "seeds": rows}
        results[f"{kind}, three seeds"] = whole | {
            key: max(row[key] for row in rows) for key in ("mismatch_max", "mismatch_mean")
        }
    return results


def child(arguments: argparse.Namespace) -> None:
    options, apart = SEEDED[arguments.kind]
    if apart:
        fused._fusion = lambda module: None  # transformers' own norms, gates and rotary embeddings
        varlen._backward_fits = lambda *_: False  # type: ignore[assignment] # torch's own attention
    if options:
        options = {"placement.name": "async", "resources.rollout.devices": ["cuda:0"], **options}
    common = {"seed": arguments.seed, "engine.kv_bytes": 8 << 30, "train.dump": False}
    smollm2(arguments.child, arguments.steps, common | options)


def smollm2(out: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    both = {"train.dump": True, "train.eval_every": 1000, "train.checkpoint.every": 25, **options}
    plaudit.train("smollm2-grpo", reward=right, steps=steps, out=out, fresh=True, options=both, quiet=True)
    return figures(out)


def placed(
    out: Path, models: Path, placement: str, steps: int, model: str = "policy", tables: dict[str, Any] | None = None
) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "task": "rl", "seed": 1, "model": {"path": str(models / model), "device": "cuda", "dtype": "bfloat16"},
        "data": {"path": str(models / "prompts.jsonl")},
        "algorithm": {"name": "grpo"}, "placement": {"name": placement},
        "train": {"steps": steps, "prompts_per_step": 8, "samples_per_prompt": 8, "lr": 1e-6, "warmup": 1,
                  "minibatches": 2, "micro_batch_tokens": 32768, "eval_every": 1000, "checkpoint": {"every": 1000}},
        "sampling": {"max_tokens": 256},
    }  # fmt: skip
    for name, table in (tables or {}).items():
        recipe[name] = {**recipe.get(name, {}), **table}
    plaudit.train(recipe, reward=even, out=out, fresh=True, quiet=True)
    return figures(out)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO": ("colocated", {"algorithm": {"name": "ppo"}, "critic": {"lr": 1e-5}}),
    "recomputed, optimizer on the host": (
        "colocated",
        {"model": {"recompute": True}, "train": {"offload_optimizer": True}},
    ),
    "free": ("colocated", {"train": {"deterministic": False}}),
}


ASYNC = {"placement": {"name": "async", "staleness": 0}, "resources": {"rollout": {"devices": ["cuda:0"]}},
         "engine": {"kv_bytes": 8 << 30}}  # fmt: skip
FEWER = {"sampling": {"max_tokens": 128}, "train": {"prompts_per_step": 4}}
LORA = {"model": {"lora": {"rank": 16}}, "engine": {"kv_bytes": 8 << 30}}


def verified(root: Path, steps: int) -> dict[str, Any]:
    tables = {"train": {"dump": True, "checkpoint": {"every": 2}}}
    row = placed(root / "verify", root / "models", "colocated", steps, tables=tables)
    command = [sys.executable, "-m", "plaudit", "verify", str(root / "verify"), "--step", str(steps - 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return row | {"verify": (done.stdout + done.stderr).strip().splitlines()[-4:], "status": done.returncode}


def judged(run: Path) -> tuple[int, str]:
    """The result of `plaudit verify` on a run."""
    done = subprocess.run(
        [sys.executable, "-m", "plaudit", "verify", str(run)], capture_output=True, text=True, timeout=300
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


def changed(root: Path, steps: int) -> dict[str, Any]:
    run = root / "whole"
    row = smollm2(run, steps, {"train.checkpoint.every": steps - 1})
    copies = {}
    for name in ("weight", "reward", "seed"):
        copies[name] = root / name
        shutil.copytree(run, root / name)
    file = copies["weight"] / "final" / "model.safetensors"
    tensors = load_file(file)
    first = tensors[min(tensors)].view(-1)
    first[0] = torch.nextafter(first[0], first[0] + 1)
    save_file(tensors, file, {"format": "pt"})
    dump = copies["reward"] / "rollouts" / f"step-{steps:06d}.jsonl"
    sample, *others = dump.read_text().splitlines()
    other = json.loads(sample)
    dump.write_text("\n".join([json.dumps({**other, "reward": 1 - other["reward"]}), *others]) + "\n")
    recipe = copies["seed"] / "recipe.toml"
    recipe.write_text(re.sub(r"^seed = \d+$", "seed = 4321", recipe.read_text(), count=1, flags=re.MULTILINE))
    with ThreadPoolExecutor() as pool:
        verdicts = dict(zip(["as it is", *copies], pool.map(judged, [run, *copies.values()]), strict=True))
    for name, (status, line) in verdicts.items():
        print(f"{name}: {status} {line}", flush=True)
    return row | {"verify": verdicts}


def make_shapes(directory: Path) -> None:
    """Creates random models of the Llama's size, with its tokenizer."""
    from transformers import (
        AutoTokenizer,
        Gemma2Config,
        Gemma2ForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )  # fmt: skip

    from plaudit.models import save

    tokenizer = AutoTokenizer.from_pretrained(directory / "policy")
    common = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
              "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 1024, "head_dim": 128,
              "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
    for name, config, kind in (
        ("qwen3", Qwen3Config(**common), Qwen3ForCausalLM),
        ("mistral", MistralConfig(**common, sliding_window=128), MistralForCausalLM),
        ("gemma2", Gemma2Config(**common, sliding_window=128, query_pre_attn_scalar=128), Gemma2ForCausalLM),
    ):
        torch.manual_seed(1)
        with torch.device("cuda"):
            save(kind(config).to(torch.bfloat16), tokenizer, directory / name)


def large_llama() -> Any:
    """An 8B Llama with random weights."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32_000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, max_position_embeddings=1024, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip


def mixture() -> Any:
    """A model of Qwen3-30B-A3B's shape, with the vocabulary of the small model's tokenizer."""
    from vllm_gpu import config

    shape = config("30B-A3B")
    shape.vocab_size, shape.bos_token_id, shape.eos_token_id = 32_000, None, 1
    return shape


def drawn_lora(root: Path, steps: int, shape: Any, tables: dict[str, Any]) -> dict[str, Any]:
    """Adapters and random base weights that engine and learner share: the base is drawn in memory and never written,
    because a 30B mixture has 61 GB of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from plaudit.train.policy import rl_models, trainee

    models, read = root / "models", rl_models.load_policy
    shape.save_pretrained(models / shape.model_type)
    AutoTokenizer.from_pretrained(models / "policy").save_pretrained(models / shape.model_type)

    def drawn(source: Any, dtype: Any, device: str) -> Any:
        loaded = read(models / "policy", dtype, device)
        torch.manual_seed(1)
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(shape, dtype=next(loaded.module.parameters()).dtype).eval()
        return replace(loaded, module=module)

    save = trainee.Trainee.save_final
    rl_models.load_policy = drawn  # type: ignore[assignment]
    trainee.Trainee.save_final = lambda self, directory: None  # type: ignore[method-assign]
    try:
        row = placed(
            root / f"lora-{shape.model_type}", models, "colocated", steps, shape.model_type, {**LORA, **tables}
        )
    finally:
        rl_models.load_policy, trainee.Trainee.save_final = read, save  # type: ignore[method-assign]
    if torch.cuda.is_available():
        row["peak"] = torch.cuda.max_memory_allocated()
    return row


def make_model(directory: Path) -> None:
    from swapped_gpu import BIG, make_models

    make_models(directory, BIG, "cuda")
    chance = random.Random(1)
    lines = [" ".join(f"w{chance.randrange(3, 32_000)}" for _ in range(128)) for _ in range(100)]
    text = "\n".join(json.dumps({"prompt": line, "answer": ""}) for line in lines)
    (directory / "prompts.jsonl").write_text(text + "\n")


def cases(chosen: list[str], root: Path, steps: int | None) -> dict[str, Any]:
    """The function of each case, in order."""
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
    if {"shapes", "kinds", "lora", "mixture", "async", "verify"} & {*chosen} and "placements" not in chosen:
        make_model(root / "models")
    if "shapes" in chosen:
        make_shapes(root / "models")
        for name in ("qwen3", "mistral", "gemma2"):
            works[f"1B {name}"] = lambda name=name: placed(root / name, root / "models", "colocated", steps or 5, name)
    if "kinds" in chosen:
        for name, (placement, tables) in KINDS.items():
            works[f"1B {name}"] = lambda name=name, placement=placement, tables=tables: placed(
                root / name.replace(" ", "-"), root / "models", placement, steps or 5, tables=tables
            )
    if "lora" in chosen:
        works["1B LoRA"] = lambda: placed(root / "lora", root / "models", "colocated", steps or 5, tables=LORA)
        works["8B LoRA"] = lambda: drawn_lora(root, steps or 3, large_llama(), {})
    if "mixture" in chosen:
        works["30B-A3B LoRA"] = lambda: drawn_lora(root, steps or 20, mixture(), FEWER)
    if "async" in chosen:
        works["1B async, staleness 0"] = lambda: placed(
            root / "async", root / "models", "async", steps or 5, tables=ASYNC
        )
    if "seeds" in chosen:
        works["seeds"] = lambda: seeds(root, steps or 100, [*SEEDED][:2])
    if "stale" in chosen:
        works["stale"] = lambda: seeds(root, steps or 100, [*SEEDED][2:])
    if "changed" in chosen:
        works["smollm2-grpo verify"] = lambda: changed(root, steps or 5)
    if "verify" in chosen:
        works["1B verify"] = lambda: verified(root, steps or 5)
    return works


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="smollm2-grpo,smollm2-ppo,placements,free")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=Path, help="directory to keep the runs in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_training_gpu.json"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
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
            try:
                done = work()
            except Exception as error:  # the remaining cases continue
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            wall = {"wall": round(time.monotonic() - begin, 1)}
            for label, row in ({name: done} if "steps" in done else done).items():
                kept[label] = row | wall
                times = row["seconds"]
                table.add_row(
                    label, str(row["steps"]), str(row["exact_steps"]), f"{row['mismatch_max']:.1e}",
                    f"{times['step']:.3f}", f"{times['old']:.3f}", f"{times['update']:.3f}",
                    "{} → {}".format(*row["reward"]), row["weights"][:12],
                )  # fmt: skip
            arguments.out.write_text(
                json.dumps({**stamp(__file__, torch.cuda.get_device_name(), {}), "results": kept}, indent=1) + "\n"
            )
            torch.cuda.empty_cache()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
