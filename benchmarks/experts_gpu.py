"""The experts of one layer on a GPU: Plaudit's kernels compared with transformers' grouped products, in one run.

    python benchmarks/experts_gpu.py [--only speed,bits,generate,score] [--tiles]

The layer of Qwen3-30B-A3B (2048 hidden, 128 experts of 768, 8 per token), bf16, random weights and random experts, for
a decode step of 1, 64 and 1,024 rows and a prompt batch of 32,768; forward, and forward and backward with gradients of
the weights. bits: for small models of six families, the log-probs of samples drawn 700 at once compared with those
drawn alone and in batches of seven, those of a read, and those of the learner. generate: the workloads of vllm_gpu.py
with the whole model, Plaudit alone. score: the whole model over 256 ragged sequences. `--tiles` tries other tile sizes
for each size. Writes benchmarks/results/experts_gpu.json, except with --tiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hybrid_gpu import COMMON, bits
from stamp import ROOT, stamp
from vllm_gpu import config, ours

from plaudit.core import Engine, kernels
from plaudit.core.kernels import experts as expert_kernels
from plaudit.core.model import differentiable

RESULTS = ROOT / "benchmarks" / "results" / "experts_gpu.json"
HIDDEN, INNER, EXPERTS, CHOICES = 2048, 768, 128, 8
TOKENS = (1, 64, 256, 1024, 32768)
SMALL = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
FAMILIES = {
    "Qwen3-MoE": Qwen3MoeConfig(**COMMON, **SMALL, num_experts=16, head_dim=64, norm_topk_prob=True),
    "OLMoE": OlmoeConfig(**COMMON, num_experts=16, num_experts_per_tok=4),
    "Mixtral": MixtralConfig(**COMMON, num_local_experts=8, sliding_window=None),
    "gpt-oss": GptOssConfig(
        **COMMON, num_local_experts=8, num_experts_per_tok=2, head_dim=64, layer_types=["full_attention"] * 4
    ),
    "GLM-4.5": Glm4MoeConfig(**COMMON, **SMALL, **GROUPS, n_routed_experts=16, head_dim=64),
    "DeepSeek-V3": DeepseekV3Config(
        **(COMMON | {"num_key_value_heads": 4}), **SMALL, **GROUPS, n_routed_experts=16, q_lora_rank=64,
        kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
    ),
}  # fmt: skip


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of one call, from a series of calls captured in a graph to exclude the host."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000 / repeats)
    return best


def eager_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(-1)[:, :CHOICES].contiguous()
    return x, ids, torch.rand(tokens, CHOICES, device="cuda").to(torch.bfloat16)


def product_rate() -> float:
    """FLOP/s of a large product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: a @ b)


def grid(tokens: int) -> list[Any]:
    if tokens <= 256:
        sizes = itertools.product((16,), (32, 64, 128), (64, 128, 256), (4,), (3, 4, 5))
    else:
        sizes = itertools.product((64, 128), (64, 128, 256), (64,), (4, 8), (3, 4))
    return [expert_kernels.Tiles(*each) for each in sizes]


def works(tokens: int, tiles: Any, module: Any) -> list[Callable[[], object]]:
    """The two products with these tile sizes."""
    x, ids, _ = inputs(tokens)
    before = expert_kernels.FEW, expert_kernels.SOME, expert_kernels.MANY
    expert_kernels.FEW = expert_kernels.SOME = expert_kernels.MANY = tiles
    try:
        routes = kernels.routes(ids, EXPERTS)
    finally:
        expert_kernels.FEW, expert_kernels.SOME, expert_kernels.MANY = before
    inner = torch.randn(tokens * CHOICES, INNER, device="cuda", dtype=torch.bfloat16)
    return [
        lambda: kernels.expert_product(x, module.gate_up_proj, None, routes, CHOICES, gated=True),
        lambda: kernels.expert_product(inner, module.down_proj, None, routes, 0, True),
    ]


def timed(work: Callable[[], object]) -> float:
    try:
        return seconds(work, 10)
    except Exception as error:  # these tiles need more shared memory than the card has
        print(f"left out: {str(error)[:80]}", flush=True)
        return float("inf")


def compiled(case: tuple[int, Any]) -> None:
    module = built()
    for work in works(*case, module):
        with suppress(Exception):
            work()


def tried(module: Any) -> None:
    cases = [(tokens, tiles) for tokens in TOKENS for tiles in grid(tokens)]
    with multiprocessing.get_context("spawn").Pool(12) as pool:  # compiles take most of the time
        pool.map(compiled, cases, chunksize=4)
    for tokens in TOKENS:
        found = [(*(timed(work) for work in works(tokens, tiles, module)), tiles) for tiles in grid(tokens)]
        for name, at in (("gate and up", 0), ("down", 1)):
            best = sorted(found, key=lambda each: each[at])[:5]
            shown = (f"{each[at] * 1e6:.0f} µs {list(vars(each[2]).values())}" for each in best)
            print(tokens, name, *shown, sep="  ", flush=True)


def built() -> Any:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        module = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.02)
    return module


def layer(module: Any, tokens: int) -> dict[str, Any]:
    x, ids, weights = inputs(tokens)
    routes = kernels.routes(ids, EXPERTS)
    inner = kernels.expert_product(x, module.gate_up_proj, None, routes, CHOICES, gated=True)
    y = kernels.expert_product(inner, module.down_proj, None, routes, 0, True)
    parts = {
        "routes": lambda: kernels.routes(ids, EXPERTS),
        "gate and up": lambda: kernels.expert_product(x, module.gate_up_proj, None, routes, CHOICES, gated=True),
        "down": lambda: kernels.expert_product(inner, module.down_proj, None, routes, 0, True),
        "combined": lambda: kernels.combined(y, weights, CHOICES),
    }
    row = {
        "seconds": seconds(lambda: differentiable.experts(module, True, x, ids, weights)),
        "transformers": seconds(lambda: module(x, ids, weights)),
        "parts": {name: seconds(part) for name, part in parts.items()},
    }
    print(tokens, {name: round(row[name] * 1e6) for name in ("seconds", "transformers")},
          {name: round(value * 1e6) for name, value in row["parts"].items()}, flush=True)  # fmt: skip
    return row


@torch.no_grad()
def speed() -> dict[str, Any]:
    module = built()
    print("microseconds:")
    results: dict[str, Any] = {"operations/s": product_rate()}
    results |= {f"forward {tokens}": layer(module, tokens) for tokens in TOKENS}
    with torch.enable_grad():
        x, ids, weights = inputs(16384)

        def trained(forward: Callable[..., torch.Tensor]) -> None:
            module.zero_grad()
            given = x.clone().requires_grad_()
            forward(given, ids, weights).sum().backward()

        own = eager_seconds(lambda: trained(lambda *given: differentiable.experts(module, True, *given)))
        theirs = eager_seconds(lambda: trained(module))
    print(f"forward and backward, 16,384 tokens: {own * 1e3:.1f} ms, transformers {theirs * 1e3:.1f}", flush=True)
    return results | {"forward and backward 16384": {"seconds": own, "transformers": theirs}}


@torch.no_grad()
def scored() -> dict[str, float]:
    """Scores 256 ragged sequences with the whole model; also the share of the product rate, counting the active
    parameters."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config("30B-A3B"), dtype=torch.bfloat16).eval()
    engine, draw = Engine(module, kv_bytes=0.6), random.Random(3)
    taken = []
    for _ in range(3):
        sequences = [draw.choices(range(5, 40_000), k=draw.randint(100, 1100)) for _ in range(256)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.score(sequences, columns=[7, 8])
        torch.cuda.synchronize()
        taken.append(sum(map(len, sequences)) / (time.perf_counter() - begin))
    attention = HIDDEN * 128 * (2 * 32 + 2 * 4)
    active = 48 * (attention + CHOICES * 3 * HIDDEN * INNER + EXPERTS * HIDDEN)
    row = {"tokens/s": max(taken), "share": 2 * active * max(taken) / product_rate()}
    print("256 ragged sequences", row, flush=True)
    return row


WORKS = {"speed": speed, "bits": lambda: bits(FAMILIES), "generate": lambda: ours("30B-A3B"), "score": scored}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WORKS))
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    if options.tiles:
        with torch.no_grad():
            tried(built())
        return
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.is_file() else {}
    for name in options.only.split(","):
        results[name] = WORKS[name]()
    rivals = {"transformers": (version("transformers"), "experts_implementation=grouped_mm, bf16")}
    record = stamp(__file__, torch.cuda.get_device_name(), rivals)
    RESULTS.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
