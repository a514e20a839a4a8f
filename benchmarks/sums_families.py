"""A tiny hybrid and a tiny mixture of experts learn the sums world on a CPU: demonstrations, then GRPO with a rule.

The models are random ones of transformers' own classes, with the tokenizer of `sums-policy`; everything else comes from
the recipes `sums-sft` and `sums-grpo`.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from stamp import ROOT, processor, stamp
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from plaudit import train
from plaudit.models import load_any, save

SIZES: dict[str, Any] = {
    "hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "intermediate_size": 240,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "lfm2": (
        Lfm2Config,
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_5": (
        Qwen3_5TextConfig,
        {
            "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 20,
            "linear_value_head_dim": 20,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 120},
    ),
}  # fmt: skip


def random_model(name: str, directory: Path) -> Path:
    made, options = MODELS[name]
    tokenizer = load_any("sums-policy").tokenizer
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    torch.manual_seed(1)
    config = made(vocab_size=len(tokenizer), **special, **SIZES, **options)
    return save(AutoModelForCausalLM.from_config(config), tokenizer, directory)


def learn(name: str, runs: Path, args: argparse.Namespace) -> dict[str, Any]:
    recipe = tomllib.loads((ROOT / "plaudit/recipes/sums-sft.toml").read_text())
    recipe["model"] = {"path": str(random_model(name, runs / f"{name}-random"))}
    taught = {"train.steps": args.sft_steps, "train.eval_every": args.sft_steps, "seed": args.seed}
    sft = train(recipe, out=runs / f"{name}-sft", options=taught, fresh=True)
    begin = time.process_time()
    grpo = train(
        "sums-grpo", out=runs / f"{name}-grpo", model=sft.model, steps=args.steps, options={"seed": args.seed},
        fresh=True,
    )  # fmt: skip
    curve = grpo.curve("heldout/accuracy")
    return {
        "model": name, "parameters": sft.summary["parameters"], "sft_steps": args.sft_steps,
        "sft_seconds": sft.summary["seconds"], "accuracy_before": grpo.summary["accuracy_before"],
        "accuracy_after": grpo.summary["accuracy_after"], "curve": curve,
        "steps_to_0.9": next((step for step, accuracy in curve if accuracy >= 0.9), None),
        "mismatch_abs_max": max(value for _, value in grpo.curve("mismatch/abs_max")),
        "grpo_seconds": grpo.summary["seconds"], "grpo_cpu_seconds": round(time.process_time() - begin, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="qwen3_5,qwen3_moe", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--sft-steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "sums-families")
    args = parser.parse_args()
    file = ROOT / "benchmarks" / "results" / "sums_families.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    for name in args.only.split(","):
        row = learn(name, args.runs, args)
        print(json.dumps(row), flush=True)
        rows = [*(other for other in rows if other["model"] != name), row]
        file.write_text(json.dumps({**stamp(__file__, processor(), {}), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
