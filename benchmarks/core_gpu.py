"""Speed of the core on one GPU: whole calls with prefill, scheduling and stops, compared with transformers in the same
run.

    python benchmarks/core_gpu.py [--only score,groups,generate,truncated] [--shapes 1B,135M,8B] [--profile]

Speeds are also given as shares of hardware limits measured in the same run: for scoring, of the rate of a large matrix
product; for a decode step, of the lower bound set by its products at that rate and by reading its keys and values at
copy bandwidth; for truncated sampling, of the speed without truncation. benchmarks/vllm_gpu.py compares the core with
vLLM.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from stamp import stamp
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from plaudit.core import Engine, SamplingParams

SHAPES = {  # hidden, layers, heads, key-value heads, ffn
    "1B": (2048, 16, 32, 8, 8192),
    "135M": (576, 30, 9, 3, 1536),
    "8B": (4096, 32, 32, 8, 14336),
}
VOCABULARY = 49152
LEAST = {"score 1B": 450.0, "groups 1B": 520.0, "generate 1B": 100_000.0, "generate 135M": 180_000.0}


def model(kind: Any, shape: str) -> Any:
    torch.manual_seed(0)
    hidden, layers, heads, kv_heads, ffn = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn, vocab_size=VOCABULARY, max_position_embeddings=4096, num_labels=1, pad_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):  # a module created in float32 and cast afterwards would use rounded rotary angles
        return kind.from_config(config, dtype=torch.bfloat16).eval()


def best_of(repeats: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest run, without the first one, which compiles and captures graphs."""
    work()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def draw_lengths(count: int, mean: float, longest: int, rng: np.random.Generator) -> np.ndarray:
    return np.clip(rng.lognormal(mean, 0.6, count), 8, longest).astype(int)


def flops(module: torch.nn.Module, tokens: int) -> float:
    embeddings = VOCABULARY * module.config.hidden_size  # type: ignore[union-attr, operator]
    return 2.0 * (sum(p.numel() for p in module.parameters()) - embeddings) * tokens


def limits() -> dict[str, float]:
    """Measured limits of the card: FLOP/s of a large bfloat16 product, bytes/s read and written by a copy."""
    import triton

    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    source = torch.empty(1 << 32, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    product, copy = (
        triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median") / 1e3
        for work in (lambda: a @ b, lambda: target.copy_(source))
    )
    return {"flops": 2 * 8192**3 / product, "bytes": 2 * source.numel() / copy}


def decode_floor(module: torch.nn.Module, shape: str, rows: int, length: float, limit: dict[str, float]) -> float:
    """Lower bound on the seconds of a decode step: every product of all rows, and the keys and values of `length`
    tokens per row. The embeddings share the head's weights."""
    _, layers, heads, kv_heads, _ = SHAPES[shape]
    products = (flops(module, rows) + 2.0 * VOCABULARY * SHAPES[shape][0] * rows) / limit["flops"]
    cached = rows * length * layers * kv_heads * (SHAPES[shape][0] // heads) * 2 * 2
    return products + cached / limit["bytes"]


def score(shape: str, profile: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(5, VOCABULARY, n).tolist() for n in draw_lengths(256, 6.2, 4000, rng)]
    module = model(AutoModelForSequenceClassification, shape)
    engine = Engine(module, kv_bytes=2**28)
    ours = best_of(3, lambda: engine.score(sequences))
    if profile:
        show_profile(lambda: engine.score(sequences))
    found = np.array([v[0] for v in engine.score(sequences)])
    theirs, padded = best_of(1, lambda: transformers_scores(module, sequences)), transformers_scores(module, sequences)
    tokens = sum(map(len, sequences))
    return {
        "value": len(sequences) / ours, "unit": "samples/s", "transformers": len(sequences) / theirs, "tokens": tokens,
        "tflops": flops(module, tokens) / ours / 1e12,
        "share_of_limit": flops(module, tokens) / ours / limits()["flops"],
        "largest_difference": float(np.abs(found - padded).max()),
    }  # fmt: skip


@torch.inference_mode()
def transformers_scores(module: Any, sequences: list[list[int]], batch: int = 32) -> np.ndarray:
    module.set_attn_implementation("sdpa")
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    out = np.zeros(len(sequences))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        longest = max(len(sequences[i]) for i in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        mask = torch.zeros(len(chosen), longest, dtype=torch.long)
        for row, i in enumerate(chosen):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
            mask[row, : len(sequences[i])] = 1
        out[chosen] = module(input_ids=ids.cuda(), attention_mask=mask.cuda()).logits[:, 0].float().cpu().numpy()
    return out


def groups(shape: str, profile: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sequences: list[list[int]] = []
    distinct = 0
    for _ in range(32):
        prompt = rng.integers(5, VOCABULARY, 1024).tolist()
        answers = [rng.integers(5, VOCABULARY, n).tolist() for n in draw_lengths(16, 5.8, 2000, rng)]
        sequences += [prompt + answer for answer in answers]
        distinct += 1024 + sum(map(len, answers))
    module = model(AutoModelForSequenceClassification, shape)
    engine = Engine(module, kv_bytes=2**28)
    ours = best_of(3, lambda: engine.score(sequences))
    if profile:
        show_profile(lambda: engine.score(sequences))
    return {
        "value": len(sequences) / ours, "unit": "samples/s", "tokens": distinct,
        "tflops": flops(module, distinct) / ours / 1e12,
        "share_of_limit": flops(module, distinct) / ours / limits()["flops"],
        "computed": engine.stats().tokens_computed,
    }  # fmt: skip


def generate(shape: str, profile: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    count, new = 1024, 256
    module = model(AutoModelForCausalLM, shape)
    engine = Engine(module, kv_bytes=24 * 2**30)
    params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, seed=1)

    def prompts() -> list[list[int]]:  # new prompts each time: no cache hits
        return [rng.integers(5, VOCABULARY, 128).tolist() for _ in range(count)]

    ours = best_of(3, lambda: engine.generate(prompts(), params))
    if profile:
        show_profile(lambda: engine.generate(prompts(), params))
    first = best_of(3, lambda: engine.generate(prompts(), replace(params, max_tokens=1)))
    decode = (ours - first) / (new - 1)
    floor = decode_floor(module, shape, count, 128 + new / 2, limits())
    module.set_attn_implementation("sdpa")
    batch = torch.tensor(prompts()[:256], device="cuda")

    def plain() -> None:
        with torch.inference_mode():
            module.generate(batch, max_new_tokens=64, min_new_tokens=64, do_sample=True, top_k=0, use_cache=True)

    theirs = best_of(1, plain)
    return {
        "value": count * new / ours, "unit": "tokens/s", "transformers": 256 * 64 / theirs, "tokens": count * new,
        "milliseconds_a_step": ours / new * 1e3, "prefill_seconds": first, "decode_milliseconds": decode * 1e3,
        "floor_milliseconds": floor * 1e3, "share_of_limit": floor / decode,
    }  # fmt: skip


def truncated(shape: str, profile: bool) -> dict[str, Any]:
    """Tokens/s with top-k and top-p, and their share of the speed without; several times in alternation."""
    rng = np.random.default_rng(0)
    count, new = 1024, 256 if shape != "8B" else 64
    engine = Engine(model(AutoModelForCausalLM, shape), kv_bytes=24 * 2**30)
    plain = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, seed=1)
    variants = {"plain": plain, "top_k 20, top_p 0.95": replace(plain, top_k=20, top_p=0.95)}
    if profile:
        variants["top_p 0.95"] = replace(plain, top_p=0.95)

    def work(params: SamplingParams) -> None:
        engine.generate([rng.integers(5, VOCABULARY, 128).tolist() for _ in range(count)], params)

    seconds = {name: float("inf") for name in variants}
    for turn in range(3):  # the first run compiles and captures graphs
        for name, params in variants.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work(params)
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - begin)
    if profile:
        for params in variants.values():
            show_profile(lambda params=params: work(params))  # type: ignore[misc]
    return {
        "value": count * new / seconds["top_k 20, top_p 0.95"], "unit": "tokens/s",
        "tokens_per_second": {name: count * new / each for name, each in seconds.items()},
        "share_of_limit": seconds["plain"] / seconds["top_k 20, top_p 0.95"],
    }  # fmt: skip


def show_profile(work: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        work()
        torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    rows = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    rows.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in rows) / 1e6
    print(f"profiled {wall:.3f} s, device busy {busy:.3f} s")
    for event in rows[:16]:
        print(f"  {event.self_device_time_total / 1e3:9.1f} ms {event.count:7d} x  {event.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="score,groups,generate,truncated")
    parser.add_argument("--shapes", default="1B,135M")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/core_gpu.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("core_gpu: no CUDA device here; skipped")
        return
    results: dict[str, Any] = {}
    for name in arguments.only.split(","):
        for shape in arguments.shapes.split(","):
            if name in ("score", "groups") and shape != "1B":
                continue
            job = {"score": score, "groups": groups, "generate": generate, "truncated": truncated}[name]
            results[f"{name} {shape}"] = job(shape, arguments.profile)
            torch.cuda.empty_cache()
    table = Table(title=torch.cuda.get_device_name())
    columns = ("work", "Plaudit", "unit", "wanted", "transformers", "vs transformers", "of the limit")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("work", "unit") else "right")
    for name, result in results.items():
        theirs = result.get("transformers")
        table.add_row(
            name, f"{result['value']:,.0f}", result["unit"], f"{LEAST.get(name, 0):,.0f}",
            f"{theirs:,.0f}" if theirs else "-", f"{result['value'] / theirs:.1f}x" if theirs else "-",
            f"{result['share_of_limit']:.0%}",
        )  # fmt: skip
    Console(width=120).print(table)
    plain = version("transformers"), "bf16, sdpa; scores in sorted, padded batches of 32; generates 256 × 64 tokens"
    ran = any("transformers" in result for result in results.values())
    record = stamp(__file__, torch.cuda.get_device_name(), {"transformers": plain} if ran else {})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
