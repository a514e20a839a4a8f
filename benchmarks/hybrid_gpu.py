"""Models with recurrent layers on one GPU: tokens/s of shapes of 1 to 2B, and how much results differ between batches.

    python benchmarks/hybrid_gpu.py [--only speed,mamba,kda,bits] [--reference] [--profile] [--out FILE]

speed   a Qwen3.5-like shape: whole calls of random weights in bf16, temperature 1 with log-probs, best of two after a
        warm-up; also the lower bound of a decode step, from products, states and keys at rates measured in the same run
mamba   the same of a Granite-4-like shape, three of four layers Mamba-2
kda     the same of a Kimi-Linear-like shape without experts, three of four layers KDA
bits    tiny models of each kind in bf16: log-probs of a sample in a batch of 700 compared with those in a batch of 7,
        alone, in a read, and in the learner's forward pass

--reference runs Mamba-2 and KDA with transformers' functions instead of the kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_gpu import limits, show_profile
from stamp import stamp
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from plaudit.core import Engine, SamplingParams
from plaudit.core.model import fusion
from plaudit.core.model.packing import use_packed_attention
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses

MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
FEW = ((256, 128, 256), (64, 128, 256), (1, 128, 128))
WORKS = {"speed": ((1024, 128, 256), *FEW), "mamba": FEW, "kda": FEW}
TOKENS: dict[str, Any] = {
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
SHAPES: dict[str, Any] = {
    "speed": Qwen3_5TextConfig(
        **TOKENS, vocab_size=248_320, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
    ),
    # Chunks of 64 tokens, which do not change the function: transformers 5.17 needs 100 GB for 64 prompts of
    # one chunk of 256.
    "mamba": GraniteMoeHybridConfig(
        **TOKENS, vocab_size=100_352, hidden_size=1536, num_hidden_layers=24, layer_types=6 * MIXED,
        num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        mamba_chunk_size=64, num_local_experts=0, shared_intermediate_size=4096,
    ),
    "kda": KimiLinearConfig(
        **TOKENS, **LATENT, vocab_size=163_840, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24,
        layer_types=6 * MIXED, mlp_layer_types=24 * ["dense"], num_attention_heads=16, num_key_value_heads=16,
        linear_num_heads=16, linear_head_dim=128,
    ),
}  # fmt: skip
COMMON = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "num_hidden_layers": 4}  # fmt: skip
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
TINY = {
    "Llama": LlamaConfig(**COMMON),
    "Qwen3.5": Qwen3_5TextConfig(**COMMON, head_dim=64, layer_types=MIXED, **DELTA),
    "Qwen3-Next": Qwen3NextConfig(
        **COMMON, head_dim=64, layer_types=MIXED, **DELTA, num_experts=0, mlp_only_layers=[0, 1, 2, 3]
    ),
    "LFM2": Lfm2Config(
        **COMMON, layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "Granite 4 (Mamba-2)": GraniteMoeHybridConfig(
        **COMMON, layer_types=MIXED, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32, mamba_chunk_size=64,
        num_local_experts=0, shared_intermediate_size=512,
    ),
    "Falcon-H1": FalconH1Config(
        **COMMON, mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32, mamba_n_groups=2,
        mamba_chunk_size=64,
    ),
    "Bamba": BambaConfig(
        **COMMON, attn_layer_indices=[3], mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32, mamba_chunk_size=64
    ),
    "Zamba 2": Zamba2Config(
        **COMMON, layers_block_type=["linear_attention", "hybrid"] * 2, n_mamba_heads=8, mamba_d_state=32,
        mamba_ngroups=2, chunk_size=64, num_mem_blocks=1, adapter_rank=16,
    ),
    "Nemotron-H": NemotronHConfig(
        **{key: value for key, value in COMMON.items() if key != "num_hidden_layers"}, head_dim=64, n_groups=2,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], mamba_num_heads=8, mamba_head_dim=64,
        ssm_state_size=32, chunk_size=64,
    ),
    "Kimi-Linear": KimiLinearConfig(
        **{**COMMON, "num_key_value_heads": 4}, layer_types=MIXED, mlp_layer_types=["dense", "sparse"] * 2,
        kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, linear_head_dim=64,
        linear_num_heads=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=128,
    ),
}  # fmt: skip


def made(config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def floor_seconds(module: Any, engine: Engine, rows: int, length: float, rates: dict[str, float]) -> float:
    """Lower bound of a decode step in seconds: weights or products, whichever takes longer, states read and written,
    keys and values read."""
    weights, embeddings = sum(p.numel() for p in module.parameters()), module.get_input_embeddings().weight
    if module.get_output_embeddings().weight is not embeddings:
        weights -= embeddings.numel()
    products = max(2.0 * weights * rows / rates["flops"], 2.0 * weights / rates["bytes"])
    states = 2.0 * rows * engine.decoder.state_bytes() / rates["bytes"]
    return products + states + rows * length * engine.decoder.token_bytes() / rates["bytes"]


def speed(name: str, profile: bool) -> dict[str, Any]:
    module, rates, results = made(SHAPES[name]), limits(), {}
    print(f"{sum(p.numel() for p in module.parameters()) / 1e9:.2f}B parameters", flush=True)
    rng, vocabulary = np.random.default_rng(0), module.config.vocab_size
    state_bytes = Engine(module, kv_bytes=2 * 2**30, max_running=1).decoder.state_bytes()
    for count, prompt, new in WORKS[name]:
        # A running sequence uses three states, and states take half of the pool.
        engine = Engine(module, kv_bytes=int(6.2 * count * state_bytes + 2e9), max_running=count)
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, seed=1)

        def seconds(
            params: SamplingParams, engine: Engine = engine, count: int = count, prompt: int = prompt
        ) -> float:  # fmt: skip
            prompts = [rng.integers(5, vocabulary, prompt).tolist() for _ in range(count)]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.generate(prompts, params)
            return time.perf_counter() - begin

        seconds(params)
        best = min(seconds(params) for _ in range(2))
        first = min(seconds(replace(params, max_tokens=1)) for _ in range(2))
        decode = (best - first) / (new - 1)
        floor = floor_seconds(module, engine, count, prompt + new / 2, rates)
        results[f"{count} × ({prompt} → {new})"] = row = {
            "tokens_per_second": count * new / best, "prefill_seconds": first, "decode_milliseconds": decode * 1e3,
            "floor_milliseconds": floor * 1e3, "share_of_limit": floor / decode,
            "state_bytes": engine.decoder.state_bytes(), "running": engine._runner.scheduler.max_running,
        }  # fmt: skip
        print(count, prompt, new, {key: round(value, 3) for key, value in row.items()}, flush=True)
        if profile and count in (64, 1024):
            show_profile(lambda seconds=seconds, params=params: seconds(replace(params, max_tokens=32)))  # type: ignore[misc]
        engine.sleep()
        del engine
        torch.cuda.empty_cache()
    return results


def difference(ours: list[float], theirs: list[float]) -> dict[str, float]:
    apart = np.abs(np.array(ours, dtype=np.float32) - np.array(theirs, dtype=np.float32))
    return {"equal": float((apart == 0).mean()), "mean": float(apart.mean()), "max": float(apart.max())}


def bits(families: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of the same samples in other batches, in the learner and in a read."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 500, int(n)).tolist() for n in rng.integers(1, 120, 700)]
    params = SamplingParams(temperature=1.0, max_tokens=70, ignore_eos=True, seed=3)
    results: dict[str, Any] = {}
    for name, config in families.items():
        module = made(config)
        engine = Engine(module, kv_bytes=8 * 2**30, max_running=700)
        many = engine.generate(prompts, params)
        rows: dict[str, Any] = {}
        for at_once in (7, 1):
            fewer = Engine(module, kv_bytes=2**30, max_running=at_once)
            again = [s for i in range(0, 21, at_once) for s in fewer.generate(prompts[i : i + at_once], params)]
            same = [(a, b) for a, b in zip(again, many[:21], strict=True) if a.token_ids == b.token_ids]
            flat = [[value for pair in same for value in pair[k].logprobs] for k in (0, 1)]
            rows[f"700 beside {at_once}"] = {"same_tokens": len(same) / 21} | (difference(*flat) if same else {})
        samples = many[:64]
        responses = pack_responses(samples, torch.device("cuda"))
        module.train()
        use_packed_attention(module)
        found, _ = logprobs_and_entropy(engine.decoder, responses, hidden_of(module, responses), 1.0)
        module.eval()
        sampled = [value for sample in samples for value in sample.logprobs]
        rows["700 beside the learner"] = difference(sampled, found.detach().cpu().tolist())
        read = engine.logprobs([[*s.prompt_ids, *s.token_ids] for s in samples])
        tails = [v for s, values in zip(samples, read, strict=True) for v in values[-len(s.token_ids) :].tolist()]
        rows["700 beside a read"] = difference(sampled, tails)
        results[name] = rows
        engine.sleep()
        fewer.sleep()
        torch.cuda.empty_cache()
        print(name, json.dumps(rows), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="bits,speed,mamba,kda")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hybrid_gpu.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("hybrid_gpu: no CUDA device here; skipped")
        return
    if arguments.reference:
        for name in [name for name in fusion.REPLACED if "mamba2" in name or "kimi" in name]:
            del fusion.REPLACED[name]
    results = json.loads(arguments.out.read_text())["results"] if arguments.out.is_file() else {}
    for name in arguments.only.split(","):
        key = f"{name}, reference" if arguments.reference else name
        results[key] = bits(TINY) if name == "bits" else speed(name, arguments.profile)
        record = stamp(__file__, torch.cuda.get_device_name(), {})
        arguments.out.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
