"""Generation with few and many rows on one GPU: whole calls from token ids to token ids, and a profile of a decode
step.

    python benchmarks/decode_gpu.py [--shapes 135M,1B,8B,30B-A3B] [--rows 1,64,256,512,1024] [--profile] [--out FILE]

Shapes, workloads and conditions of benchmarks/vllm_gpu.py, without vLLM. `--profile` prints the kernels of one decode
step with their count and time, from CUPTI, and the time from a step's first kernel to the next step's.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from stamp import stamp
from transformers import AutoModelForCausalLM
from vllm_gpu import REPEATS, SHAPES, VOCABULARY, WARMUP_TOKENS, WORKS, config, name_of

from plaudit.core import Engine, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results" / "decode_gpu.json"
LONG = (512, 256, 1024)  # only for shapes that have a target for it
# Target tokens/s; vLLM's are in benchmarks/results/vllm_gpu.json.
WANTED = {
    ("135M", 1024): 300_000, ("1B", 1024): 130_000, ("1B", 512): 100_000, ("1B", 64): 55_000, ("1B", 1): 1_300,
    ("8B", 1024): 20_500, ("8B", 256): 19_000, ("8B", 64): 11_000, ("8B", 1): 215,
    ("30B-A3B", 1024): 26_000, ("30B-A3B", 64): 4_200,
}  # fmt: skip


def generated(engine: Engine, draw: random.Random, work: tuple[int, int, int], tokens: int) -> float:
    rows, prompt, _ = work
    prompts = [draw.choices(range(5, VOCABULARY), k=prompt) for _ in range(rows)]
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    samples = engine.generate(prompts, params)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    assert all(len(sample.token_ids) == tokens for sample in samples)
    return seconds


def show_step(engine: Engine, draw: random.Random, work: tuple[int, int, int]) -> None:
    """The kernels of a decode step, by name."""
    steps = 33
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generated(engine, draw, work, steps)
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    sampled = [event for event in events if event.name.startswith("_sample")]
    first, last = sampled[-17].time_range.end, sampled[-1].time_range.end
    of_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if first <= event.time_range.start < last:
            of_name[event.name].append(event.time_range.end - event.time_range.start)
    print(f"a step takes {(last - first) / 16:.0f} µs, kernels {sum(map(sum, of_name.values())) / 16:.0f}")
    for name, times in sorted(of_name.items(), key=lambda item: -sum(item[1]))[:24]:
        print(f"  {sum(times) / 16:8.1f} µs  {len(times) / 16:6.1f} of {sum(times) / len(times):6.2f}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,64,256,512,1024")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("decode_gpu: no CUDA device here; skipped")
        return
    wanted_rows = {int(rows) for rows in options.rows.split(",")}
    record: dict[str, Any] = {**stamp(__file__, torch.cuda.get_device_name(), {}), "rows": []}
    for shape in options.shapes.split(","):
        torch.manual_seed(0)
        with torch.device("cuda"):
            module = AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16).eval()
        engine = Engine(module, kv_bytes=0.8)
        draw = random.Random(2)
        for work in (*WORKS, LONG):
            if work[0] not in wanted_rows or (work == LONG and (shape, work[0]) not in WANTED):
                continue
            seconds = [generated(engine, draw, work, tokens) for tokens in (WARMUP_TOKENS, *[work[2]] * REPEATS)][1:]
            rate = work[0] * work[2] / min(seconds)
            aim = WANTED.get((shape, work[0]))
            wanted = f", wanted {aim:,}" if aim else ""
            print(f"{shape:8} {name_of(*work):20} {rate:10,.0f} tokens/s{wanted}", flush=True)
            record["rows"].append({"shape": shape, "work": name_of(*work), "seconds": seconds, "tokens/s": rate,
                                   "wanted": aim})  # fmt: skip
            if options.profile:
                show_step(engine, draw, work)
        del engine, module
        gc.collect()
        torch.cuda.empty_cache()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
