"""Every family equals plain transformers: alone, in a batch, from the cache, after preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.core.model.packing import ALONE, hidden_rows, pack, use_packed_attention
from plaudit.records import NEXT
from tests.core import tiny

FAMILIES = sorted(tiny.CONFIGS)
GREEDY = SamplingParams(temperature=0, max_tokens=24)


NAT = 1.0  # log-probs have the rounding error of logits, even close to 0


def close(actual: np.ndarray, expected: np.ndarray, scale: float) -> None:
    """`scale`: the magnitude of such values. A value near 0 still has the rounding error of this scale."""
    error = np.abs(actual - expected).max() / max(np.abs(expected).max(), scale)
    assert error < 1e-4, f"relative error {error}"


def spread(rows: Sequence[np.ndarray]) -> float:
    """The range of all values that a head returned."""
    return float(np.ptp(np.concatenate([row.ravel() for row in rows])))


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_alone_batched_and_cached_match_transformers(family: str) -> None:
    module = tiny.model(family)
    engine = Engine(module)
    ids = tiny.sequences(1, 7, 2, 50)
    expected = [tiny.plain_logprobs(module, s) for s in ids]
    for got in (engine.logprobs(ids), engine.logprobs(ids, cache=True), [engine.logprobs([s])[0] for s in ids]):
        for g, e in zip(got, expected, strict=True):
            close(g, e, NAT)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_with_long_sequences_attended_alone_and_short_ones_grouped(family: str) -> None:
    module = tiny.model(family)
    engine = Engine(module, budget=512)
    ids = tiny.sequences(3, 9, ALONE - 40, ALONE + 60)
    layout = pack(ids).layout
    assert any(group.alone for group in layout.groups)
    assert any(len(group.queries) > 1 for group in layout.groups)
    expected = [tiny.plain_logprobs(module, s) for s in ids]
    for got in (engine.logprobs(ids), engine.logprobs(ids, cache=True), engine.logprobs(ids, cache=True)):
        for g, e in zip(got, expected, strict=True):
            close(g, e, NAT)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_given_tokens_at_given_positions(family: str) -> None:
    module = tiny.model(family)
    engine = Engine(module, budget=64)
    ids = tiny.sequences(4, 6, 3, 40)
    positions = [[0, len(s) // 2] if len(s) // 2 else [0] for s in ids]
    columns = [5, NEXT, 11]
    tables = [torch.log_softmax(tiny.plain(module, s).float(), dim=-1).numpy() for s in ids]
    expected = [
        np.array([[table[p][s[p + 1] if c == NEXT else c] for c in columns] for p in where])
        for table, s, where in zip(tables, ids, positions, strict=True)
    ]
    requests = [
        engine.submit_score(s, positions=where, columns=columns, logprobs=True)
        for s, where in zip(ids, positions, strict=True)
    ]
    stepped: dict[int, np.ndarray] = {}
    while engine.busy:
        stepped |= {u.request: u.values for u in engine.step() if u.values is not None}
    read = engine.score(ids, positions=positions, columns=columns, logprobs=True)
    last = engine.score(ids, columns=[5, 11], logprobs=True, cache=True)
    for i, e in enumerate(expected):
        close(read[i], e, NAT)
        close(stepped[requests[i]], e, NAT)
        close(last[i], tables[i][-1][[5, 11]], NAT)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_transformers(family: str) -> None:
    module = tiny.model(family)
    prompts = tiny.sequences(2, 6, 1, 40)
    expected = [tiny.plain_greedy(module, p, 24) for p in prompts]
    engine = Engine(module)
    assert [list(s.token_ids) for s in engine.generate(prompts, GREEDY)] == expected
    # again with prefix hits; and with a pool so small that sequences preempt each other
    assert [list(s.token_ids) for s in engine.generate(prompts, GREEDY)] == expected
    small = Engine(module, kv_bytes=engine.decoder.token_bytes() * 64, budget=32, max_running=8)
    assert [list(s.token_ids) for s in small.generate(prompts, GREEDY)] == expected
    assert small.stats().preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_raw_logprobs_of_samples_match_the_model(family: str) -> None:
    module = tiny.model(family)
    engine = Engine(module)
    for sample in engine.generate(tiny.sequences(3, 4, 3, 20), SamplingParams(max_tokens=12, seed=5)):
        sequence = [*sample.prompt_ids, *sample.token_ids]
        close(np.array(sample.raw_logprobs), tiny.plain_logprobs(module, sequence)[len(sample.prompt_ids) - 1 :], NAT)


# gpt_neox and nanochat have no class with a head for sequences.
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gpt_neox", "nanochat")])
@pytest.mark.parametrize("labels", [1, 3])
def test_sequence_scores_match_transformers(family: str, labels: int) -> None:
    module = tiny.model(family, "sequence", labels=labels)
    engine = Engine(module)
    prompts = tiny.sequences(4, 3, 20, 40)
    sequences = [p + r for p in prompts for r in tiny.sequences(5, 4, 1, 20)]
    expected = [tiny.plain(module, s).numpy().reshape(-1) for s in sequences]
    for cache in (False, True, True):
        for actual, e in zip(engine.score(sequences, cache=cache), expected, strict=True):
            assert actual.dtype == np.float32
            close(actual, e, spread(expected))
    assert engine.stats().tokens_shared > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_neox"])
def test_step_scores_at_positions_match_transformers(family: str) -> None:
    module = tiny.model(family, "token", labels=2)
    engine = Engine(module)
    ids = tiny.sequences(6, 6, 8, 40)
    positions = [[2, len(s) // 2, len(s) - 1] for s in ids]
    expected = [tiny.plain(module, s)[where].numpy() for s, where in zip(ids, positions, strict=True)]
    for cache in (False, True):
        for actual, e in zip(engine.score(ids, positions=positions, cache=cache), expected, strict=True):
            close(actual, e, spread(expected))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_vocabulary_columns_match_transformers(family: str) -> None:
    module = tiny.model(family)
    engine = Engine(module)
    ids = tiny.sequences(7, 5, 8, 40)
    expected = [tiny.plain(module, s)[:, [5, 11]].numpy() for s in ids]
    for actual, e in zip(engine.score(ids, columns=[5, 11]), expected, strict=True):
        close(actual, e[-1], spread(expected))
    cached = engine.score(ids, positions=[[0, 3]] * 5, columns=[5, 11], cache=True)
    for g, e in zip(cached, expected, strict=True):
        close(g, e[[0, 3]], spread(expected))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_gradients_of_a_packed_batch_match_separate_sequences(family: str) -> None:
    module = tiny.model(family)
    use_packed_attention(module)
    ids = tiny.sequences(8, 4, 3, 20)
    weights = torch.linspace(-1, 1, sum(map(len, ids)) * 32).sin().reshape(-1, 32)
    torch.autograd.backward((hidden_rows(module, pack(ids)) * weights).sum())
    packed_gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    for s, share in zip(ids, torch.split(weights, [len(s) for s in ids]), strict=True):
        torch.autograd.backward((hidden_rows(module, pack([s])) * share).sum())
    largest = max(float(gradient.abs().max()) for gradient in packed_gradients.values())
    for name, parameter in module.named_parameters():
        if name in packed_gradients and parameter.grad is not None:
            close(packed_gradients[name].numpy(), parameter.grad.numpy(), 1e-3 * largest)
    assert len(packed_gradients) > 5


def test_lean_trunk_is_used_where_supported_and_sees_new_weights_and_adapters() -> None:
    """Llama, Qwen and Mistral shapes run in few calls; other modules run unchanged; no weights are copied."""
    from plaudit.core.proof.support import inspect

    fits = {
        name: inspect(tiny.model(name)).lean is not None for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2")
    }
    assert fits == {"llama": True, "qwen2": True, "qwen3": True, "mistral": True, "gemma2": False}
    other: Any = tiny.model("llama", dtype=torch.bfloat16)
    for layer in other.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert inspect(other).lean is None
    model: Any = tiny.model("llama")
    engine = Engine(model)
    ids = [[5, 6, 7, 8, 9, 10]]
    before = engine.logprobs(ids)[0]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    changed = engine.logprobs(ids)[0]
    assert abs(changed - before).max() > 1e-4
    inner = model.model.layers[0].self_attn.q_proj
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(inner, torch.nn.Linear(*[inner.out_features] * 2))
    fresh = Engine(model)
    assert fresh.decoder.lean is None
