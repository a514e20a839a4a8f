"""The check at load, its results on disk, and what it rejects; the reference is plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Ernie4_5Config,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    PreTrainedConfig,
    SmolLM3Config,
)

from plaudit.core import Engine, SamplingParams
from plaudit.core.proof import support, verdict
from plaudit.core.proof.stand_in import POSITIONS, shrunk, stand_in, tokens_for
from plaudit.core.proof.support import inspect
from plaudit.errors import ModelError, RequestError
from tests.core import tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "plaudit" / "trials"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The class names of the models whose stand-ins were run."""
    names: list[str] = []
    run = support._tried
    monkeypatch.setattr(
        support, "_tried", lambda module, kind: names.append(type(module).__name__) or run(module, kind)
    )
    return names


def small_weights(config: PreTrainedConfig, seed: int, size: float) -> Any:
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=size)
    return module.eval()


def test_verdict_is_cached_for_the_same_config_only(cache: Path, tried: list[str]) -> None:
    inspect(tiny.model("llama"))
    inspect(tiny.model("llama"))
    assert tried == ["LlamaForCausalLM"]
    assert [json.loads(f.read_text()) for f in cache.iterdir()] == [{"refused": None, "lean": True}]
    inspect(tiny.model("llama", "sequence"))
    inspect(tiny.model("llama", layers=3))
    assert len(tried) == len(list(cache.iterdir())) == 3


def test_rejection_is_cached_too(cache: Path, tried: list[str]) -> None:
    module = AutoModelForCausalLM.from_config(shrunk(DiffLlamaConfig(num_hidden_layers=2)))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"\(diffllama\) calls attention twice in a layer"):
            inspect(module)
    assert tried == ["DiffLlamaForCausalLM"]


def test_damaged_or_unwritable_cache_repeats_the_trial(cache: Path, tried: list[str]) -> None:
    inspect(tiny.model("llama"))
    (file,) = cache.iterdir()
    file.write_text("{")
    assert inspect(tiny.model("llama")).lean is not None
    assert len(tried) == 2
    assert json.loads(file.read_text())["lean"] is True
    file.unlink()
    cache.rmdir()
    cache.write_text("a file where the folder was")
    assert inspect(tiny.model("llama")).lean is not None
    assert len(tried) == 3


def test_changed_model_code_changes_the_cache_key(cache: Path, tmp_path: Path) -> None:
    module = tiny.model("llama")
    key = verdict.key_of(module, "causal")
    assert key == verdict.key_of(tiny.model("llama"), "causal")

    class Other(type(module.model.norm)):  # type: ignore[misc, union-attr]
        pass

    module.model.norm.__class__ = Other  # type: ignore[union-attr]
    assert verdict.key_of(module, "causal") != key


@pytest.mark.parametrize(
    "config",
    [
        SmolLM3Config(num_hidden_layers=4), HeliumConfig(num_hidden_layers=2),
        GraniteConfig(num_hidden_layers=2, residual_multiplier=0.22, embedding_multiplier=12.0, logits_scaling=8.0),
        Ernie4_5Config(num_hidden_layers=2),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_half_precision_uses_the_lean_trunk_only_where_it_is_exact(config: PreTrainedConfig) -> None:
    """First on weights too small to show a difference in half precision, then on others."""
    module = small_weights(shrunk(config), 1, 0.02).to(torch.bfloat16)
    engine = Engine(module)
    assert engine.decoder.lean is None
    with torch.no_grad():
        for parameter, other in zip(
            module.parameters(), small_weights(shrunk(config), 2, 0.3).parameters(), strict=True
        ):
            parameter.copy_(other)
    engine.new_version()
    ids = tokens_for(module, 3, 40)
    errors = np.abs(engine.logprobs([ids])[0] - tiny.plain_logprobs(module, ids))
    assert errors.mean() < 0.1


def test_stand_in_has_one_layer_of_each_kind_and_reduced_sizes() -> None:
    shrunk_config = shrunk(SmolLM3Config(num_hidden_layers=36))
    module = AutoModelForCausalLM.from_config(shrunk_config)
    small: Any = stand_in(module, 0)
    assert [layer.self_attn.use_rope for layer in small.model.layers] == [1, 1, 1, 0]
    wide = AutoModelForCausalLM.from_config(LlamaConfig(**tiny.GROUPED | {"num_hidden_layers": 9, "hidden_size": 128}))
    small = stand_in(wide, 0)
    assert (len(small.model.layers), small.config.hidden_size, small.config.max_position_embeddings) == (
        2,
        64,
        POSITIONS,
    )


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (8, 8), (32, 8)])
def test_stand_in_keeps_the_attention_head_grouping(heads: int, key_heads: int) -> None:
    config = LlamaConfig(
        vocab_size=90, hidden_size=8 * heads, intermediate_size=32, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads,
    )  # fmt: skip
    small = shrunk(config)
    assert small.num_attention_heads % small.num_key_value_heads == 0
    assert (small.num_key_value_heads == 1) == (key_heads == 1)
    assert (small.num_key_value_heads == small.num_attention_heads) == (key_heads == heads)
    inspect(AutoModelForCausalLM.from_config(config))


def test_forward_hooks_are_called_for_every_step() -> None:
    module: Any = tiny.model("llama")
    engine = Engine(module)
    assert engine.decoder.lean is not None
    ids = [[5, 6, 7, 8, 9, 10]]
    before = engine.logprobs(ids)[0]
    lengths: list[int] = []
    handle = module.model.layers[0].register_forward_hook(lambda _layer, _inputs, rows: lengths.append(rows.shape[1]))
    assert np.allclose(engine.logprobs(ids)[0], before, atol=1e-4)
    assert lengths == [6]
    engine.generate(ids, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(lengths) == 4
    handle.remove()
    engine.logprobs(ids)
    assert len(lengths) == 4
    assert engine.decoder.lean is not None


def test_hook_that_changes_hidden_states_changes_scores() -> None:
    module: Any = tiny.model("llama", "sequence")
    engine = Engine(module)
    ids = list(range(3, 43))
    module.model.layers[1].register_forward_hook(lambda _layer, _inputs, rows: rows * 0.5 + 1)
    expected = tiny.plain(module, ids).numpy()
    assert np.allclose(engine.score([ids])[0], expected, atol=1e-4)
    assert np.allclose(engine.score([ids], cache=True)[0], expected, atol=1e-4)


def test_classifier_scores_the_same_token_as_transformers() -> None:
    """The last token that is not padding; with pad = eos the token before the end token."""
    module: Any = tiny.model("llama", "sequence", labels=2)
    engine = Engine(module)
    for pad in (None, 0, 2):
        module.config.pad_token_id = pad
        for ids in ([5, 6, 7, 2], [5, 6, 2, 2], [5, 2, 7], [2, 2], [5, 0]):
            assert np.allclose(engine.score([ids])[0], tiny.plain(module, ids).numpy(), atol=1e-5), (pad, ids)
    last = engine.score([[5, 6, 7, 2]], positions=[[3]])[0]
    assert not np.allclose(last, engine.score([[5, 6, 7, 2]])[0])


def test_prompts_can_be_arrays_and_tensors() -> None:
    engine = Engine(tiny.model("llama"))
    ids = [5, 6, 7, 8]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    expected = engine.generate([ids], greedy)[0].token_ids
    for prompts in (
        np.array(ids),
        torch.tensor(ids),
        np.array([ids]),
        torch.tensor([ids]),
        [np.array(ids)],
        tuple(ids),
    ):
        assert [s.token_ids for s in engine.generate(prompts, greedy)] == [expected]  # type: ignore[arg-type]
    assert np.array_equal(engine.logprobs(np.array(ids))[0], engine.logprobs([ids])[0])  # type: ignore[arg-type]
    assert np.array_equal(engine.score(torch.tensor(ids), columns=[3])[0], engine.score([ids], columns=[3])[0])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token ids, which are whole numbers"):
        engine.generate(np.array([1.5, 2.0]))  # type: ignore[arg-type]


def test_temperature_below_the_float32_range_is_rejected() -> None:
    with pytest.raises(RequestError, match=r"temperature is 1e-38, and must be at least 1e-30, or 0 for the most"):
        SamplingParams(temperature=1e-38)
    engine = Engine(tiny.model("llama"))
    cold = engine.generate([[5, 6]], SamplingParams(temperature=1e-30, max_tokens=5, seed=1))[0]
    assert cold.token_ids == engine.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=5))[0].token_ids
    assert np.isfinite(cold.logprobs).all()
