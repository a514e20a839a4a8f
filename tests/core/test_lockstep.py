"""A model over two ranks gives the results of one rank: real processes, gloo, tiny models."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from plaudit.core import Engine
from plaudit.core.device.backend import Copy, Span
from plaudit.core.device.lockstep import packed_spans, unpacked_copies, unpacked_spans
from plaudit.core.model.packing import trunk
from plaudit.core.model.split import split_parts
from plaudit.errors import ModelError
from plaudit.models.weights import Cut
from tests.core.mixtures import VOCAB, mixture
from tests.core.rank_engine import CASES, MIXED, answers, module, scored
from tests.core.tiny import GROUPED, SIZES, model, plain_logprobs
from tests.forked import run_all
from tests.rotation import in_turn, mostly_slow


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "cpu", 2, 1, 2)


def run_ranks(out: Path, device: str, size: int, *worlds: int, cases: Iterable[str] = CASES) -> Path:
    for stages in worlds:
        (out / str(stages)).mkdir()
    command = ["-m", "tests.core.rank_engine"]
    arguments = [str(size), str(out / "store"), str(out), device, " ".join(cases), *map(str, worlds)]
    run_all([[*command, str(rank), *arguments] for rank in range(size)], out, [{}] * size)
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stages", [1, 2])
def test_two_ranks_match_one(case: str, stages: int, on_two: Path) -> None:
    check(on_two / str(stages), case)


def test_norms_without_weights_are_not_split(tmp_path: Path) -> None:
    run_ranks(tmp_path, "cpu", 2, 1, cases=["nanochat-causal"])
    check(tmp_path / "1", "nanochat-causal")


@pytest.mark.slow
def test_four_ranks_in_two_stages_match_one(tmp_path: Path) -> None:
    run_ranks(tmp_path, "cpu", 4, 2)
    for case in CASES:
        check(tmp_path / "2", case)


@pytest.mark.parametrize("case", mostly_slow(MIXED))
def test_two_ranks_with_half_of_the_experts_each_match_one(case: str, tmp_path: Path) -> None:
    """Log-probs also match plain transformers."""
    run_ranks(tmp_path, "cpu", 2, 1, cases=[case])
    check(tmp_path / "1", case)
    results = load_file(tmp_path / "1" / f"{case}.safetensors")
    expected = [plain_logprobs(module(case), ids) for ids in scored(VOCAB)]
    assert np.abs(results["logprobs"] - np.concatenate(expected)).max() < 1e-4


@pytest.mark.slow
def test_mixtures_over_four_ranks_in_two_stages_match_one(tmp_path: Path) -> None:
    staged = [case for case in MIXED if module(case).config.base_model_pp_plan]
    cases = [case for number, case in enumerate(staged) if in_turn(number, 3)]
    run_ranks(tmp_path, "cpu", 4, 2, cases=cases)
    for case in cases:
        check(tmp_path / "2", case)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_sharing_a_key_value_head_each_hold_a_copy(size: int) -> None:
    """Nothing else is replicated: every other matrix is split into as many parts as there are ranks."""
    base = trunk(model("one_key"))
    cuts: dict[str, set[Any]] = {}
    for matrix in split_parts(base, size):
        leaf = matrix.name.rpartition(".")[2]
        cuts[leaf] = {matrix.cut(share, size) for share in range(size)}
    assert cuts.pop("k_proj") == cuts.pop("v_proj") == {Cut(0, 0, 16)}
    assert {len(parts) for parts in cuts.values()} == {size}


def test_fused_qkv_with_more_ranks_than_key_value_heads_is_rejected() -> None:
    config = GPTNeoXConfig(**SIZES)
    config.num_key_value_heads = 1
    with pytest.raises(ModelError, match=r"lacks the matrices k_proj and v_proj .*: set tensor_parallel to 1 or fewer"):
        list(split_parts(trunk(GPTNeoXForCausalLM(config)), 2))


def check(out: Path, case: str) -> None:
    full_model = module(case)
    expected = answers(Engine(full_model, kv_bytes=4 << 20), case)
    actual = load_file(out / f"{case}.safetensors")
    if "logprobs" in actual:
        plain = np.concatenate([plain_logprobs(full_model, ids) for ids in scored(full_model.config.vocab_size)])
        assert np.abs(actual["logprobs"] - plain).max() < 1e-4
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        if name == "tokens":
            assert actual[name].tolist() == values.tolist()
        else:
            assert np.abs(actual[name] - values).max() < 2e-5, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_ranks_on_one_gpu_match_one_process(tmp_path: Path) -> None:
    """gloo reduces GPU tensors and sends them between stages; NCCL would need one GPU per rank."""
    run_ranks(tmp_path, "cuda:0", 2, 1, 2)
    for case in CASES:
        expected = answers(Engine(module(case).to("cuda:0"), kv_bytes=4 << 20), case)
        for stages in (1, 2):
            actual = load_file(tmp_path / str(stages) / f"{case}.safetensors")
            for name, values in expected.items():
                if name in ("tokens", "drawn"):
                    continue  # ties may be resolved differently
                assert np.abs(actual[name] - values).max() < 1e-4, (case, name)


def test_indivisible_heads_are_rejected_with_the_equation() -> None:
    uneven = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "num_attention_heads": 6, "hidden_size": 48}, num_key_value_heads=3)
    )
    with pytest.raises(ModelError, match=r"6 / 2 = 3, 3 / 2 = 1\.5"):
        list(split_parts(trunk(uneven), 2))
    with pytest.raises(ModelError, match=r"4 attention heads .* tensor_parallel = 8 \(4 / 8 = 0\.5"):
        list(split_parts(trunk(LlamaForCausalLM(LlamaConfig(**GROUPED))), 8))
    six = LlamaConfig(**{**SIZES, "num_attention_heads": 12, "hidden_size": 48}, num_key_value_heads=4)
    with pytest.raises(ModelError, match=r"12 / 6 = 2, 4 / 6 = 0\.666667, 6 / 4 = 1\.5"):
        list(split_parts(trunk(LlamaForCausalLM(six)), 6))
    laguna = trunk(mixture("laguna"))
    laguna.layers[1].self_attn.num_heads = 6
    with pytest.raises(ModelError, match=r"6 attention heads of layers.1.self_attn.q_proj .* 6 / 4 = 1\.5"):
        list(split_parts(laguna, 4, dealt=True))
    with pytest.raises(ModelError, match="which Plaudit does not support"):
        list(split_parts(trunk(model("olmo2")), 2))


def test_step_message_round_trips() -> None:
    spans = [Span([5, 6, 7], 16, [3, 9], [2]), Span([8], 0, [4], []), Span([1, 2], 3, [0], [0, 1])]
    copies = [Copy(1, 2, 0, 7), Copy(9, 3, 4, 2)]
    for sent_copies in (copies, []):
        parts = packed_spans(spans, sent_copies)
        received = [
            Span(s.tokens.tolist(), s.start, s.blocks.tolist(), s.wanted.tolist())  # type: ignore[union-attr]
            for s in unpacked_spans(parts)
        ]
        assert received == spans
        assert unpacked_copies(parts) == sent_copies
