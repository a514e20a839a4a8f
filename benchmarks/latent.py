"""Latent attention over latents, compared with keys and values expanded for all heads as transformers does: KV bytes
per token, and tokens per second of generation and of prompts.

    python benchmarks/latent.py                  # a small DeepSeek-V2 in float32 on a CPU, one thread, CPU seconds
    python benchmarks/latent.py --device cuda    # the attention of DeepSeek-V2-Lite in bf16, eight layers, wall clock

Both forms run in this process, in alternation, on the same random weights; the best of three of each is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config

from plaudit import Engine, SamplingParams
from plaudit.core.model import latent

DENSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": None, "max_position_embeddings": 8192}
SHAPES = {
    "cpu": DeepseekV2Config(
        **DENSE, vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, head_dim=32,
        first_k_dense_replace=2,
    ),
    "cuda": DeepseekV2Config(
        **DENSE, vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, head_dim=64, first_k_dense_replace=8,
    ),
}  # fmt: skip
WORKS = {
    "cpu": [(1, 128, 64), (16, 128, 64), (4, 1000, 64)],
    "cuda": [(1, 128, 256), (64, 128, 512), (512, 128, 256), (32, 4096, 256)],
}
"""Rows, tokens of a prompt, new tokens."""
FORMS = ("expanded", "latents")


def engine_of(device: str, form: str) -> Engine:
    expands = latent._expands
    latent._expands = expands if form == "latents" else lambda kind: False  # type: ignore[assignment]
    try:
        torch.manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(SHAPES[device], dtype=dtype).eval()
        return Engine(module, kv_bytes=2**30 if device == "cpu" else 24 * 2**30)
    finally:
        latent._expands = expands


def prompts(rows: int, tokens: int, first: int) -> list[list[int]]:
    return [[3 + (first + 11 * i + j * j + 5 * i * j) % 2000 for j in range(tokens)] for i in range(rows)]


def seconds(clock: Callable[[], float], work: Callable[[], Any]) -> float:
    begin = clock()
    work()
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(SHAPES))
    device = parser.parse_args().device
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    engines = {form: engine_of(device, form) for form in FORMS}
    for form, engine in engines.items():
        print(f"{form}: {engine.decoder.token_bytes()} bytes of KV a token", flush=True)
    for rows, prompt, new in WORKS[device]:
        best: dict[tuple[str, int], float] = {}
        for turn in range(4):  # the first run warms up
            for form, engine in engines.items():
                for tokens in (1, new):
                    ids = prompts(rows, prompt, 3 + 7 * turn + tokens)  # prompts that are not in the cache
                    params = SamplingParams(max_tokens=tokens, temperature=1, seed=turn, ignore_eos=True)
                    took = seconds(clock, lambda e=engine, p=ids, s=params: e.generate(p, s))  # type: ignore[misc]
                    if turn:
                        best[form, tokens] = min(took, best.get((form, tokens), took))
        for form in FORMS:
            print(
                f"{rows} x ({prompt} -> {new}), {form}: {rows * new / best[form, new]:.0f} tokens/s, prompts "
                f"{rows * prompt / best[form, 1]:.0f} tokens/s", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
