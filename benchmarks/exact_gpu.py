"""Checks on one GPU, in bf16, that the log-probs the engine sampled with are bit-identical to those the learner
computes.

    python benchmarks/exact_gpu.py [--shapes 135M,1B] [--out FILE]

Random Llama shapes generate; the learner's forward pass, with gradients, runs over the samples. The same samples are
also read by `Engine.logprobs`, and prompts are generated alone. Then the cost: tokens/s of whole calls compared with an
engine with `exact=False`, in alternation, the best of three. Results are added to the result file after each shape.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_gpu import SHAPES, VOCABULARY, model
from rich.console import Console
from rich.table import Table
from stamp import stamp
from transformers import AutoModelForCausalLM

from plaudit.core import Engine, SamplingParams
from plaudit.core.model.packing import use_packed_attention
from plaudit.records import Sample
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses

WORKS = ((1024, 256), (64, 512), (1, 256))  # rows, and tokens per row


def differences(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    gap = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    equal = ours.astype(np.float32).view(np.int32) == theirs.astype(np.float32).view(np.int32)
    return {"tokens": len(ours), "equal": float(equal.mean()), "mean": float(gap.mean()), "max": float(gap.max())}


def learned(engine: Engine, module: Any, samples: list[Sample], temperature: float) -> np.ndarray:
    use_packed_attention(module)
    rows = []
    for start in range(0, len(samples), 32):
        responses = pack_responses(samples[start : start + 32], torch.device("cuda"))
        logp, _ = logprobs_and_entropy(engine.decoder, responses, hidden_of(module, responses), temperature)
        rows.append(logp.detach().cpu().numpy())
    return np.concatenate(rows)


def measure(shape: str, count: int, temperature: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    module = model(AutoModelForCausalLM, shape)
    with torch.no_grad():  # as peaked as a trained model's distribution
        module.get_output_embeddings().weight.mul_(4)
    engine = Engine(module, kv_bytes=8 * 2**30)
    params = SamplingParams(n=4, temperature=temperature, max_tokens=96, ignore_eos=True, seed=1)
    prompts = [rng.integers(5, VOCABULARY, int(rng.integers(3, 200))).tolist() for _ in range(count)]
    samples = engine.generate(prompts, params)
    sampled = np.concatenate([np.array(each.logprobs, dtype=np.float32) for each in samples])
    raw = np.concatenate([np.array(each.raw_logprobs, dtype=np.float32) for each in samples])
    module.train()
    result = {"learner": differences(learned(engine, module, samples, temperature), sampled)}
    module.eval()
    read = engine.logprobs([[*each.prompt_ids, *each.token_ids] for each in samples])
    result["read"] = differences(
        np.concatenate([r[-len(s.token_ids) :].reshape(-1) for r, s in zip(read, samples, strict=True)]), raw
    )
    alone = [engine.generate([prompt], params) for prompt in prompts[:4]]
    both = [
        (a, b) for group, i in zip(alone, range(4), strict=True) for a, b in zip(group, samples[4 * i :], strict=False)
    ]
    same = [np.array_equal(np.float32(a.logprobs), np.float32(b.logprobs)) for a, b in both]
    result["alone"] = {"tokens": 0, "equal": float(np.mean(same)), "mean": 0.0, "max": 0.0}
    return result


def cost(shape: str) -> dict[str, list[float]]:
    """Tokens/s of each workload with `exact` (results independent of the batch) and without."""
    module = model(AutoModelForCausalLM, shape)
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {}
    for exact in (True, False):
        engine = Engine(module, kv_bytes=32 * 2**30, exact=exact)
        for rows, new in WORKS:
            prompts = [rng.integers(5, VOCABULARY, 128).tolist() for _ in range(rows)]
            params = SamplingParams(max_tokens=new, ignore_eos=True, seed=1)
            seconds = []
            for _ in range(4):  # the first run captures graphs
                engine.new_version()
                begin = time.perf_counter()
                engine.generate(prompts, params)
                seconds.append(time.perf_counter() - begin)
            rates.setdefault(f"{rows} × (128 → {new})", []).append(rows * new / min(seconds))
        engine.sleep()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="135M,1B")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_gpu.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("exact_gpu: no CUDA device here; skipped")
        return
    before = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    results: dict[str, Any] = before.get("results", {})
    table = Table(title=torch.cuda.get_device_name())
    for heading in ("shape", "prompts", "temperature", "beside sampling", "equal", "mean", "max"):
        table.add_column(heading, justify="right")
    costs = {shape: cost(shape) for shape in arguments.shapes.split(",")}
    for shape, rates in costs.items():
        for work, (exact, free) in rates.items():
            print(f"{shape} {work}: {exact:,.0f} tokens/s, {free:,.0f} with exact=False ({exact / free - 1:+.1%})")
    for shape in arguments.shapes.split(","):
        for count, temperature in ((64, 1.0), (256, 0.7), (7, 1.0)):
            found = measure(shape, count, temperature)
            results[f"{shape}, {count} prompts, temperature {temperature}"] = found
            for name, each in found.items():
                table.add_row(
                    shape, str(count), str(temperature), name, f"{each['equal']:.4%}", f"{each['mean']:.2e}",
                    f"{each['max']:.2e}",
                )  # fmt: skip
            torch.cuda.empty_cache()
    Console(width=120).print(table)
    record = stamp(__file__, torch.cuda.get_device_name(), {})
    arguments.out.write_text(
        json.dumps({**record, "shapes": SHAPES, "results": results, "cost": before.get("cost", {}) | costs}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
