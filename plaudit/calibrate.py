"""Calibrates the planner for this machine: matrix products, memory, link, fixed costs of decoding and training.

The measurements replace data sheets and fitted efficiencies: rates are those reached, so efficiencies are 1.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from plaudit.config.table import to_toml
from plaudit.core import Engine, SamplingParams
from plaudit.core.device.cpu_decode import WORKSPACE
from plaudit.core.model.packing import use_packed_attention
from plaudit.heap import heap_factor
from plaudit.models import choose_device, new_llama
from plaudit.plan import ModelShape
from plaudit.plan.own_trainer import RESPONSE_SECONDS
from plaudit.records import Sample
from plaudit.train.optim.optimizer import local_master
from plaudit.train.policy.forward import hidden_of, pack_responses

FEW, MANY = 16, 48
"""Tokens of two responses; their difference removes the fixed cost of a call."""
SEQUENCES = {"cpu": 32, "cuda": 256}


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    product: tuple[int, int, int]
    """Tokens, inputs and outputs of the products that measure the rate: as many tokens as a micro-batch, so that they
    do not stay in a CPU's caches between products."""
    block: int
    """Bytes copied to measure the bandwidth."""


CPU, GPU = Shape(256, (8192, 256, 768), 256 * 2**20), Shape(512, (8192, 2048, 8192), 2 * 2**30)


def measure(device: str = "auto") -> str:
    """A hardware file, in TOML, with this machine as the accelerator `this-machine`."""
    where = torch.device(choose_device(device))
    shape = GPU if where.type == "cuda" else CPU
    wide = torch.bfloat16 if where.type == "cuda" else torch.float32
    rate = _products(where, shape.product, wide)
    bandwidth = _bandwidth(where, shape.block)
    # The planner uses half the bf16 rate for fp32.
    bf16 = rate if wide is torch.bfloat16 else 2 * rate
    layer, step, sequence = _decode(where, shape.hidden, wide)
    accelerator = {
        "memory_gb": _memory(where) / 1e9, "bandwidth_gb_s": bandwidth / 1e9, "bf16_tflops": bf16 / 1e12,
        "pcie_gb_s": _link(where) / 1e9,
    }  # fmt: skip
    constants = {
        "bandwidth_share": 1.0, "gemm_share": 1.0, "attention_share": 0.5, "layer_seconds": layer, "step_seconds": step,
        "sequence_seconds": sequence, "launch_seconds": _launches(where, shape.hidden, wide), "packing_share": 1.0,
        "response_seconds": RESPONSE_SECONDS, "reserve_bytes": _reserve(where),
        # A CPU's window fits only the layers of small models: for others the blocks are gathered at every step.
        "cache_passes": 3.0 if where.type == "cpu" else 1.0,
        "heap_factor": heap_factor() if where.type == "cpu" else 1.0,
        # Memory that an engine reserves for decoding: graphs, or a CPU's window of contiguous keys.
        "graph_bytes": float(WORKSPACE) if where.type == "cpu" else 0.3e9,
    }  # fmt: skip
    if where.type == "cpu":  # a GPU's kernels are fused, as in the fitted constant
        constants["activation_passes"] = _passes(where, shape.hidden, rate, bandwidth)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return to_toml({"host_memory_gb": host, "accelerator": {"this-machine": accelerator}, "constants": constants})


def _best(call: Callable[[], object], where: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest of several runs, after a warm-up. A single thread is measured in CPU time, so that other
    work on the same cores does not count."""
    clock = time.process_time if where.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(repeats + 1):
        _wait(where)
        start = clock()
        call()
        _wait(where)
        times.append(clock() - start)
    return min(times[1:])


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _products(where: torch.device, product: tuple[int, int, int], dtype: torch.dtype) -> float:
    """FLOP/s of the three products of a linear layer in training: forward, and backward for its input and weight."""
    tokens, inputs, outputs = product
    activations = torch.randn(tokens, inputs, device=where, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=where, dtype=dtype)
    out = torch.randn(tokens, outputs, device=where, dtype=dtype)
    products: tuple[Callable[[], object], ...] = (
        lambda: activations @ weight.T,
        lambda: out @ weight,
        lambda: out.T @ activations,
    )
    return 2 * tokens * inputs * outputs * len(products) / sum(_best(each, where) for each in products)


def _bandwidth(where: torch.device, size: int) -> float:
    """Bytes per second of a copy, which reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device=where).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), where)


def _link(where: torch.device) -> float:
    """Bandwidth from host to device; on the CPU of a copy in memory."""
    size = 256 * 2**20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=where.type == "cuda").fill_(1)
    return size / _best(lambda: host.to(where, copy=True), where)


def _memory(where: torch.device) -> float:
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _reserve(where: torch.device) -> float:
    """Memory of a process that has run a model, besides the model."""
    if where.type == "cuda":
        gc.collect()  # exclude finished engines, and memory that the allocator caches for them
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(where)
        return float(whole - free - torch.cuda.memory_allocated(where))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _shape(hidden: int, layers: int) -> ModelShape:
    return ModelShape(512, hidden, layers, heads=4, kv_heads=2, head_dim=hidden // 4, ffn=3 * hidden, tied=True)


def _llama(where: torch.device, hidden: int, layers: int) -> nn.Module:
    shape = _shape(hidden, layers)
    return new_llama(
        "policy", vocab_size=shape.vocab, hidden_size=hidden, layers=layers, heads=shape.heads, kv_heads=shape.kv_heads,
        intermediate_size=shape.ffn, max_positions=512, seed=1,
    ).to(where)  # fmt: skip


def _decode(where: torch.device, hidden: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """(seconds per layer, per step, per sequence in a step), from engines of two depths and batches of two sizes."""

    def seconds(layers: int, sequences: int) -> float:
        engine = Engine(_llama(where, hidden, layers).to(dtype))
        prompts = [[5 + i, 6, 7, 8] for i in range(sequences)]
        times = []
        for tokens in (FEW, MANY):
            params = SamplingParams(max_tokens=tokens, min_tokens=tokens)
            times.append(_best(lambda params=params: engine.generate(prompts, params), where, 3))  # type: ignore[misc]
        return max(1e-7, (times[1] - times[0]) / (MANY - FEW))

    count = SEQUENCES[where.type]
    shallow, deep, many = seconds(2, 1), seconds(8, 1), seconds(2, count)
    layer = max(1e-7, (deep - shallow) / 6)
    return layer, max(1e-6, shallow - 2 * layer), max(1e-8, (many - shallow) / (count - 1))


def _launches(where: torch.device, hidden: int, dtype: torch.dtype) -> float:
    """Launch time of one layer, with so few tokens that only launches take time."""
    # Two prompts with two responses each, which includes the launches for shared prompts. A CPU has no launches.
    prompts = (range(4, 8), range(5, 9)) if where.type == "cuda" else (range(4, 8),)
    samples = [_sample(ids, ids, group) for group, ids in enumerate(prompts) for _ in range(len(prompts))]
    return max(1e-6, _learning(where, hidden, dtype, samples))


def _passes(where: torch.device, hidden: int, rate: float, bandwidth: float) -> float:
    """How often an activation is transferred between memory and chip in a forward pass: the time of a layer beyond its
    matrix products when training on groups of responses of many lengths."""
    draw = random.Random(1)
    prompts = [[draw.randrange(512) for _ in range(9)] for _ in range(16)]
    samples = [
        _sample(prompt, [draw.randrange(512) for _ in range(draw.randint(8, 30))], group)
        for group, prompt in enumerate(prompts)
        for _ in range(8)
    ]
    tokens = pack_responses(samples, where).packed.input_ids.shape[1]
    one, two = _shape(hidden, 1), _shape(hidden, 2)
    products = 6 * (two.parameters - one.parameters) * tokens / rate
    crossing = 3 * one.activation_numbers * 4 * tokens / bandwidth
    return max(1.0, (_learning(where, hidden, torch.float32, samples) - products) / crossing)


def _sample(prompt: Sequence[int], response: Sequence[int], group: int) -> Sample:
    n = len(response)
    return Sample(
        tuple(prompt), tuple(response), "", (0.0,) * n, (0.0,) * n, (0,) * n, (1,) * n, "length", group=group
    )  # fmt: skip


def _learning(where: torch.device, hidden: int, dtype: torch.dtype, samples: Sequence[Sample]) -> float:
    """Seconds of forward and backward of one layer in our trainer."""

    def seconds(layers: int) -> float:
        model = _llama(where, hidden, layers).to(dtype).train()
        use_packed_attention(model)
        masters = [local_master(parameter, parameter) for parameter in model.parameters()]

        def once() -> None:
            hidden_of(model, pack_responses(samples, where)).float().sum().backward()  # type: ignore[no-untyped-call]
            for master in masters:
                master.grad = None

        return _best(once, where, 3)

    return (seconds(8) - seconds(2)) / 6
