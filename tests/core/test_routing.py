"""The recorded experts of every token equal the choices of plain transformers, however the engine computes it."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from plaudit.core import Engine, SamplingParams
from plaudit.core.proof.own import eager, own_rows
from plaudit.core.proof.stand_in import stir
from plaudit.core.proof.support import inspect
from plaudit.core.routing import Recorder, Replay, Routing
from plaudit.errors import DataError, ModelError, RequestError
from plaudit.records import Sample
from tests.core.families import Case, cases, tiny_config
from tests.core.mixtures import CONFIGS, decoded, mixture, own_experts
from tests.core.tiny import model
from tests.rotation import in_turn, mostly_slow

PROMPTS = [list(range(5, 45)), list(range(5, 30)), [5, 6, 7, 50], [60], [*range(5, 45), 9]]
PARAMS = SamplingParams(n=3, max_tokens=20, seed=1)


def check(samples: list[Sample], module: Any, family: str) -> None:
    for sample in samples:
        assert sample.experts is not None
        recorded = decoded(sample.experts, module, family)
        ids = sample.prompt_ids + sample.token_ids
        assert len(recorded) == len(ids) - 1, "the last token is drawn and never read"
        assert np.array_equal(np.sort(recorded, axis=-1), own_experts(module, family, ids)[:-1])


@pytest.mark.parametrize("family", mostly_slow(CONFIGS))
def test_recorded_experts_match_plain_transformers(family: str) -> None:
    module = mixture(family)
    engine = Engine(module, record_experts=True, kv_bytes=1 << 22)
    check(engine.generate(PROMPTS, PARAMS), module, family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"budget": 16}, {"max_running": 2}, {"look_every": 1}, {"kv_bytes": 16 * 8 * 390}],
    ids=["prompts in pieces", "two at a time", "a look at every token", "blocks are short"],
)
def test_recorded_experts_do_not_depend_on_engine_limits(options: dict[str, Any]) -> None:
    module = mixture("qwen3_moe")
    expected = Engine(module, record_experts=True, kv_bytes=1 << 22).generate(PROMPTS, PARAMS)
    engine = Engine(module, record_experts=True, **{"kv_bytes": 1 << 22, **options})
    actual = engine.generate(PROMPTS, PARAMS)
    assert [s.token_ids for s in actual] == [s.token_ids for s in expected]
    check(actual, module, "qwen3_moe")
    if "kv_bytes" in options:
        assert engine.stats().preemptions > 0
    for number, prompt in enumerate(PROMPTS):  # alone, with prefix hits on the other samples
        alone = engine.generate([prompt], PARAMS)
        assert [s.experts for s in alone] == [s.experts for s in expected[3 * number : 3 * number + 3]]
    assert engine.stats().tokens_shared > 0


def test_continued_conversation_has_the_experts_of_all_its_tokens() -> None:
    module = mixture("qwen3_moe")
    engine = Engine(module, record_experts=True, kv_bytes=1 << 22)
    (first,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=9, seed=3))
    shared = engine.stats().tokens_shared
    (second,) = engine.generate([[*first.prompt_ids, *first.token_ids, 7, 8]], SamplingParams(max_tokens=9, seed=4))
    assert engine.stats().tokens_shared - shared == len(first.prompt_ids + first.token_ids) - 1
    check([second], module, "qwen3_moe")
    assert first.experts is not None
    assert second.experts is not None
    assert second.experts.startswith(first.experts)
    # A partial sample without recorded experts can be continued.
    partial = Sample(**{name: getattr(first, name) for name in first.__slots__ if name != "experts"})
    (continued,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=20, seed=3), begun=[[partial]])
    check([continued], module, "qwen3_moe")


def test_without_recording_samples_have_no_experts_and_kv_is_not_larger() -> None:
    module = mixture("qwen3_moe")
    plain, records = Engine(module, kv_bytes=1 << 22), Engine(module, record_experts=True, kv_bytes=1 << 22)
    (sample,) = plain.generate([[5, 6]], SamplingParams(max_tokens=3, seed=1))
    assert sample.experts is None
    assert records.decoder.token_bytes() - plain.decoder.token_bytes() == 3 * 2  # routers, experts of a token


def test_unsupported_expert_recording_is_rejected_in_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM \(llama\) has no router that selects experts .*: leave out train.routing_r"
    ):
        Engine(model("llama"), record_experts=True)
    engine = Engine(mixture("mixtral"), record_experts=True, kv_bytes=1 << 22)
    with pytest.raises(RequestError, match="not transferred with the KV of their tokens"):
        engine.export_kv([5, 6, 7])
    routing = Routing(engine.decoder)
    with pytest.raises(DataError, match="7 bytes of recorded experts, but MixtralForCausalLM has 6 per token"):
        routing.rows(bytes(7), 4)
    with pytest.raises(DataError, match="has expert 4, but MixtralForCausalLM has only 4"):
        routing.rows(bytes([0, 1, 0, 4, 0, 1]), 4)


def test_routing_hooks_are_removed_when_a_forward_fails() -> None:
    module = mixture("qwen3_moe")
    routing = Routing(inspect(module))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), eager(module):
        expected = module(ids).logits
        broken = Broken(torch.zeros(3, 3, 2), torch.ones(3, dtype=torch.bool))
        with pytest.raises(ZeroDivisionError), routing.by(broken):
            module(ids)
        assert torch.equal(module(ids).logits, expected)
    assert torch.topk(torch.tensor([[1.0, 2.0]]), 1).indices.item() == 1


class Broken(Replay):
    def experts(self, router: int, scores: torch.Tensor, own: Any) -> Any:
        return 1 / 0


# Every mixture that the core supports except phimoe, whose router picks experts one by one with max.

NO_TOPK = {"phimoe"}


def mixtures() -> list[Case]:
    causal_cases = [case for case in cases() if case.kind == "causal" and case.name == case.family]
    return [case for case in causal_cases if _has_experts(case)]


def _has_experts(case: Case) -> bool:
    words = """moe mixtral deepseek_v gpt_oss dbrx dots1 aria_text longcat qwen3_next axk1 flex_olmo hy_v3 kimi laguna
        mellum mimo minimax_m nemotron_h solar_open"""
    return any(word in case.family for word in words.split())


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for number, c in enumerate(mixtures()) if in_turn(number, 4)], ids=str)
def test_every_family_replays_the_given_experts(case: Case) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        module: Any = AutoModelForCausalLM.from_config(tiny_config(case), attn_implementation="eager").eval()
    stir(module, 0)
    try:
        decoder = inspect(module)
    except ModelError:  # tests/core/test_families.py has the reason
        return
    if case.family in NO_TOPK:
        with pytest.raises(ModelError, match="no router that selects experts by topk"):
            Routing(decoder)
        return
    engine = Engine(module, record_experts=True, kv_bytes=1 << 22)
    (sample,) = engine.generate([list(range(5, 25))], SamplingParams(max_tokens=12, seed=1))
    routing = Routing(decoder)
    assert sample.experts is not None
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids[:-1]]])
    chosen = torch.from_numpy(routing.rows(sample.experts, ids.shape[1] + 1).astype(np.int64))
    replay = Replay(chosen, torch.ones(ids.shape[1], dtype=torch.bool))
    recorder = Recorder()
    with torch.no_grad(), routing.by(recorder), eager(module):
        module(ids, use_cache=False)
    assert torch.equal(recorder.rows().sort(-1).values, chosen.sort(-1).values)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * parameter.std(correction=0) * torch.randn(parameter.shape))
    received: list[torch.Tensor] = []
    for part in module.modules():
        part.register_forward_pre_hook(lambda _, args: received.extend(a for a in args if _indices(a, chosen)))
    with routing.by(replay):
        rows = own_rows(module, ids[0].tolist())
    assert replay.differed()[0].any() or max(routing.counts) == 1
    if case.family != "jetmoe":  # its gates count the tokens of each expert themselves
        assert torch.equal(torch.stack(received, dim=1).sort(-1).values, chosen.sort(-1).values)
    rows.square().sum().backward()
    with_gradient = [n for n, p in module.named_parameters() if p.grad is not None and p.grad.any()]
    names = {part: name for name, part in module.named_modules()}
    for router in (part for part in names if len(part._forward_pre_hooks) > 2):  # routing adds two, this test one
        assert any(name.startswith(names[router]) for name in with_gradient) or max(routing.counts) == 1


def _indices(value: Any, chosen: torch.Tensor) -> bool:
    """Whether a value is the tensor of chosen experts of each token."""
    shape = (len(chosen), chosen.shape[-1])
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == shape
