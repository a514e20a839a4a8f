"""Routing replay of a small random mixture on a CPU: how much engine and learner differ without and with it, and the
cost of recording and replaying.

    python benchmarks/routing_replay.py [--dtype bfloat16] [--seeds 3]

A Qwen3-MoE of six layers, 32 experts with four per token; 8 prompts of 32 tokens, 2 samples of 48 each, one thread. In
float32 nothing differs, and the CPU seconds of generation and of an update's passes are printed too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from plaudit.core import Engine, SamplingParams
from plaudit.core.model.packing import use_packed_attention
from plaudit.core.proof.support import inspect
from plaudit.core.routing import Routing
from plaudit.records import Sample
from plaudit.train.policy.experience import flat
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses, replaying

CONFIG = Qwen3MoeConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32, max_position_embeddings=256,
    initializer_range=0.1,
)  # fmt: skip


def engine_of(module: Any, record: bool) -> Engine:
    return Engine(module, record_experts=record, kv_bytes=1 << 26)


def drawn(engine: Engine, seed: int) -> list[Sample]:
    prompts = torch.randint(3, 512, (8, 32), generator=torch.Generator().manual_seed(seed)).tolist()
    engine.new_version()  # no cached state of an earlier call
    return engine.generate(prompts, SamplingParams(n=2, max_tokens=48, seed=seed))


def learner(module: Any, samples: list[Sample], routing: Routing | None) -> tuple[torch.Tensor, float | None]:
    """Log-probs of the response tokens, and the share of tokens routed to other experts."""
    decoder = inspect(module)
    use_packed_attention(module)
    responses = pack_responses(samples, decoder.device, routing)
    with replaying(routing, responses):
        logp, _ = logprobs_and_entropy(decoder, responses, hidden_of(module, responses), 1.0)
        if torch.is_grad_enabled():
            logp.sum().backward()
    if responses.replay is None:
        return logp, None
    differed, known = responses.replay.differed()
    return logp, differed[known].mean().item()


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds, the best of three."""
    took = []
    for _ in range(3):
        begin = time.process_time()
        work()
        took.append(time.process_time() - begin)
    return min(took)


def compared(module: Any, seed: int) -> None:
    routing = Routing(inspect(module))
    samples = drawn(engine_of(module, record=True), seed)
    behaviour = flat(samples, "logprobs")
    for name, by in (("own routing", None), ("replayed", routing)):
        with torch.no_grad():
            logp, share = learner(module, samples, by)
        apart = (logp - behaviour).abs()
        far = (apart > 0.01).float().mean()
        print(f"seed {seed}, {name}: mean {apart.mean():.2g}, largest {apart.max():.2g}, above 0.01 {far:.3f}", end="")
        print("" if share is None else f", other choices {share:.4f}", flush=True)
    if module.dtype != torch.float32:
        return
    for name, by in (("without", None), ("with", routing)):
        engine = engine_of(module, record=by is not None)
        generate = seconds(partial(drawn, engine, seed))
        update = seconds(partial(learner, module, samples, by))
        print(f"seed {seed}, {name}: generation {generate:.2f}, forward and backward {update:.2f} CPU s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        compared(AutoModelForCausalLM.from_config(CONFIG, dtype=getattr(torch, options.dtype)).eval(), seed)


if __name__ == "__main__":
    main()
