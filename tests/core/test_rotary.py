"""Rotary embeddings that depend on the sequence length: up to the length where their frequencies change, results equal
plain transformers; longer requests are rejected, or use the long frequencies if the config says so."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig

from plaudit.core import Engine, SamplingParams
from plaudit.core.model import operations
from plaudit.core.model.fused import fused_rows
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.packing import pack, use_packed_attention
from plaudit.errors import RequestError
from plaudit.models import load_any, load_policy, save

ORIGINAL, LIMIT = 72, 128  # positions covered by the short factors, and all positions
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LIMIT, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.25,
}  # fmt: skip


def longrope(partial: float = 1.0, one_set: bool = False) -> dict[str, Any]:
    count = int(16 * partial) // 2
    long = [4.0 + i for i in range(count)]
    short = long if one_set else [1.0 + i / 10 for i in range(count)]
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long,
        "factor": LIMIT / ORIGINAL, "original_max_position_embeddings": ORIGINAL, "partial_rotary_factor": partial,
    }  # fmt: skip


def phi(partial: float) -> Phi3Config:
    return Phi3Config(**SIZES, rope_parameters=longrope(partial), original_max_position_embeddings=ORIGINAL)


CASES: dict[str, tuple[PreTrainedConfig, int]] = {
    "phi-3": (phi(1.0), ORIGINAL),
    "phi-4-mini": (phi(0.75), ORIGINAL),
    "llama longrope": (LlamaConfig(**SIZES, rope_parameters=longrope()), ORIGINAL),
    "llama one set of factors": (LlamaConfig(**SIZES, rope_parameters=longrope(one_set=True)), LIMIT),
    "llama dynamic": (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}), LIMIT
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Engine, torch.nn.Module, int]:
    config, limit = CASES[request.param]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    plain = copy.deepcopy(module)
    plain.set_attn_implementation("eager")
    return Engine(module, kv_bytes=2**22), plain, limit


def sequences(limit: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 97) for _ in range(length)] for length in (5, limit, 17, limit - 1, 33)]


@torch.inference_mode()
def own_logprobs(plain: Any, tokens: list[int]) -> torch.Tensor:
    table = plain(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return table[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


def test_logprobs_batched_alone_and_cached_match_transformers(case: tuple[Engine, Any, int]) -> None:
    engine, plain, limit = case
    assert engine.decoder.max_positions == limit
    tokens = sequences(limit)
    results = (
        engine.logprobs(tokens),
        [engine.logprobs([sequence])[0] for sequence in tokens],
        engine.logprobs(tokens, cache=True),
    )
    for result in (*results, engine.logprobs(tokens, cache=True)):
        for sequence, actual in zip(tokens, result, strict=True):
            torch.testing.assert_close(torch.tensor(actual), own_logprobs(plain, sequence), rtol=1e-4, atol=1e-4)


def test_sampled_logprobs_match_transformers_up_to_the_last_position(case: tuple[Engine, Any, int]) -> None:
    engine, plain, limit = case
    prompts = [sequence[: limit - 12] for sequence in sequences(limit) if len(sequence) >= limit - 12]
    for sample in engine.generate(prompts, SamplingParams(n=2, max_tokens=None, seed=3, ignore_eos=True)):
        full = [*sample.prompt_ids, *sample.token_ids]
        assert len(full) == limit
        expected = own_logprobs(plain, full)[len(sample.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.raw_logprobs), expected, rtol=1e-4, atol=1e-4)


def test_gradients_match_the_module(case: tuple[Engine, Any, int]) -> None:
    engine, plain, limit = case
    same_gradients(engine.decoder.module, plain, sequences(limit)[:3])


def same_gradients(module: Any, plain: Any, tokens: list[list[int]]) -> None:
    use_packed_attention(module)
    rows = fused_rows(module, pack(tokens, torch.device("cpu")))
    torch.manual_seed(2)
    weights = torch.randn(rows.shape)
    (rows * weights).sum().backward()
    start = 0
    for sequence in tokens:
        row = plain.model(torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
        (row * weights[start : start + len(sequence)]).sum().backward()
        start += len(sequence)
    for (name, parameter), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        if parameter.grad is None:  # the head was not called
            assert expected.grad is None, name
            continue
        error = (parameter.grad - expected.grad).abs().max() / expected.grad.abs().max()
        assert error < 1e-5, f"{name}: {error}"


def test_longer_sequences_are_rejected_with_the_fix(case: tuple[Engine, Any, int]) -> None:
    engine, _, limit = case
    with pytest.raises(RequestError, match=f"{limit + 1} tokens are more than the {limit} positions") as error:
        engine.logprobs([[5] * (limit + 1)])
    assert ("set short_factor to long_factor" in str(error.value)) == (limit == ORIGINAL)


def test_fused_forward_uses_the_short_factors_after_a_longer_sequence(
    case: tuple[Engine, Any, int],
) -> None:
    """Another caller of the same module may have switched it to the long factors."""
    _, plain, limit = case
    ids = torch.tensor([sequences(limit)[2]])
    with torch.inference_mode():
        expected = plain.model(ids, use_cache=False).last_hidden_state
        fusion = Fusion(plain.model, operations)
        plain.model(torch.tensor([[5] * (LIMIT + 8)]), use_cache=False)
        with fusion.applied(False):
            actual = plain.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["phi-3", "phi-4-mini"])
def long_case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A directory with the fix from docs/core.md and a config.json in the hub's format, and plain transformers with the
    original config."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CASES[request.param][0], attn_implementation="eager").eval()
    directory = save(copy.deepcopy(plain), load_any("sums-policy").tokenizer, tmp_path / "phi")
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")}
    config["rope_scaling"] = {"type": "longrope"} | dict.fromkeys(("short_factor", "long_factor"), rope["long_factor"])
    (directory / "config.json").write_text(json.dumps(config))
    return directory, plain


def test_with_long_factors_only_longer_sequences_match_transformers(long_case: tuple[Path, Any]) -> None:
    """For them transformers uses the long factors with the original config."""
    directory, plain = long_case
    engine = Engine.load(directory, device="cpu")
    assert engine.decoder.max_positions == LIMIT
    rng = random.Random(1)
    tokens = [[rng.randrange(3, 97) for _ in range(length)] for length in (ORIGINAL + 1, LIMIT, 90, LIMIT - 1)]
    results = (
        engine.logprobs(tokens),
        [engine.logprobs([sequence])[0] for sequence in tokens],
        engine.logprobs(tokens, cache=True),
    )
    for result in (*results, engine.logprobs(tokens, cache=True)):
        for sequence, actual in zip(tokens, result, strict=True):
            torch.testing.assert_close(torch.tensor(actual), own_logprobs(plain, sequence), rtol=1e-4, atol=1e-4)
    prompts = [sequence[:length] for sequence, length in zip(tokens[1:], (5, 60, ORIGINAL + 8), strict=True)]
    for sample in engine.generate(prompts, SamplingParams(n=2, max_tokens=None, seed=3, ignore_eos=True)):
        full = [*sample.prompt_ids, *sample.token_ids]
        assert len(full) == LIMIT
        expected = own_logprobs(plain, full)[len(sample.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.raw_logprobs), expected, rtol=1e-4, atol=1e-4)
    same_gradients(load_policy(directory).module, plain, tokens)
