"""The engine on a model with peft LoRA adapters: active adapters apply, and KV of other adapters is never used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from plaudit.core import Engine, SamplingParams
from plaudit.errors import ModelError
from tests.core import tiny

IDS = tiny.sequences(3, 3, 20, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=10)


def lora(*targets: str, **options: Any) -> LoraConfig:
    """With random weights, because a freshly created peft adapter has no effect."""
    torch.manual_seed(len(targets))
    return LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), init_lora_weights=False, **options)


def adapted(kind: str = "causal") -> Any:
    model = get_peft_model(tiny.model("llama", kind), lora("q_proj", "v_proj", "up_proj"))
    model.add_adapter("other", lora("k_proj", "down_proj"))
    return model.eval()


def same(engine: Engine, model: Any) -> bool:
    """Whether log-probs, cached scores and greedy tokens match the model's own current forward."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    expected = [tiny.plain_logprobs(plain, ids) for ids in IDS]
    results = [engine.logprobs(IDS), engine.logprobs(IDS, cache=True)]
    near = all(np.allclose(a, b, atol=2e-4) for r in results for a, b in zip(r, expected, strict=True))
    columns = engine.score(IDS, columns=[4, 5], cache=True)
    logits = [tiny.plain(plain, ids)[-1, [4, 5]].numpy() for ids in IDS]
    near &= all(np.allclose(a, b, atol=2e-4) for a, b in zip(columns, logits, strict=True))
    tokens = [list(s.token_ids) for s in engine.generate(IDS, GREEDY)]
    return near and tokens == [tiny.plain_greedy(plain, ids, 10) for ids in IDS]


def test_each_adapter_state_has_its_own_prefix_cache_entries() -> None:
    model = adapted()
    engine = Engine(model)
    plain = Engine(tiny.model("llama"))
    states = set()

    def computed() -> int:
        before = engine.stats().tokens_computed
        engine.logprobs(IDS, cache=True)
        return engine.stats().tokens_computed - before

    def run() -> list[np.ndarray]:
        assert computed() == sum(map(len, IDS))  # no prefix cache hits
        states.add(engine.decoder.adapter_state())
        assert same(engine, model)
        return engine.score(IDS, columns=[4, 5], cache=True)

    first = run()
    with model.disable_adapter():
        disabled = run()
        for a, b in zip(disabled, plain.score(IDS, columns=[4, 5]), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)
    model.set_adapter("other")
    second = run()
    assert len(states) == 3
    for a, b in ((first, disabled), (first, second), (disabled, second)):
        assert all(np.abs(x - y).max() > 1e-2 for x, y in zip(a, b, strict=True))
    model.set_adapter("default")
    shared = engine.stats().tokens_shared
    assert same(engine, model)
    assert engine.stats().tokens_shared > shared  # prefix cache hits on the entries of the first adapter
    engine.check()


def test_adapters_added_and_removed_after_the_engine_was_built() -> None:
    module: Any = tiny.model("llama")
    engine = Engine(module)
    assert engine.decoder.lean is not None
    assert same(engine, module)
    model = get_peft_model(module, lora("q_proj", "o_proj", "gate_proj", modules_to_save=["norm", "lm_head"])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    assert same(engine, model)
    with model.disable_adapter():
        assert same(engine, model)
    model.merge_adapter()
    assert same(engine, model)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    engine.new_version()  # the module's own weights have changed
    assert engine.decoder.adapter_state() == ()
    assert same(engine, merged)


def test_adapter_switch_during_generation_recomputes_the_sequence() -> None:
    model = adapted()
    engine = Engine(model, look_every=2)
    engine.submit(IDS[0], GREEDY)
    for _ in range(3):
        engine.step()
    resident = engine.stats().tokens_resident
    model.set_adapter("other")
    updates = []
    while engine.busy:
        updates += engine.step()
    sample = updates[-1].sample
    assert sample is not None
    assert engine.stats().preemptions == 1
    assert engine.stats().tokens_computed > len(IDS[0]) + resident
    kept = resident - len(IDS[0]) + 1  # tokens sampled with the first adapter
    prompt = [*IDS[0], *sample.token_ids[:kept]]
    assert list(sample.token_ids[kept:]) == tiny.plain_greedy(model.get_base_model(), prompt, 10 - kept)
    for name in ("default", "other"):
        model.set_adapter(name)
        assert same(engine, model)
    engine.check()


def test_reward_model_with_an_adapter_matches_its_own_forward() -> None:
    model = get_peft_model(tiny.model("llama", "sequence"), lora("q_proj", "v_proj", task_type="SEQ_CLS")).eval()
    engine = Engine(model)
    for cache in (False, True):
        scores = engine.score(IDS, cache=cache)
        with torch.inference_mode():
            for ids, score in zip(IDS, scores, strict=True):
                model.get_base_model().set_attn_implementation("eager")
                expected = model(input_ids=torch.tensor([ids])).logits[0].numpy()
                np.testing.assert_allclose(score, expected, atol=2e-4)


def test_adapter_on_the_vocabulary_head_is_applied() -> None:
    model = get_peft_model(tiny.model("llama"), lora("q_proj", "lm_head")).eval()
    assert same(Engine(model), model)


def test_prompt_tuning_is_rejected() -> None:
    model = get_peft_model(tiny.model("llama"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="learned tokens"):
        Engine(model)
