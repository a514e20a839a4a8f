from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from plaudit import models
from plaudit.errors import ConfigError, ModelError

from .builders import IDS, VOCABULARY, byte_tokenizer, causal, classifier, same, write_plain

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "intermediate_size": 32,
    "max_positions": 64,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "neox"])
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load_round_trip_is_bit_identical(family: str, tied: bool, tmp_path: Path) -> None:
    module = causal(family, tied)
    loaded = models.load_policy(write_plain(module, tmp_path / "a"))
    assert loaded.kind == "policy"
    assert not loaded.module.training
    assert same(loaded.module, module)
    saved = models.save(loaded.module, loaded.tokenizer, tmp_path / "b")
    plain = AutoModelForCausalLM.from_pretrained(saved).eval()
    assert same(plain, module)
    assert torch.equal(plain(IDS).logits, module(IDS).logits)


def test_sharded_files_are_loaded(tmp_path: Path) -> None:
    module = causal()
    write_plain(module, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert same(models.load_any(tmp_path).module, module)


def test_symlinks_out_of_the_directory_are_followed(tmp_path: Path) -> None:
    module = causal()
    write_plain(module, tmp_path / "real")
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "real").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert same(models.load_policy(tmp_path / "links").module, module)


def test_bfloat16_is_kept_or_converted_to_float32(tmp_path: Path) -> None:
    module = causal().to(torch.bfloat16)
    write_plain(module, tmp_path / "a")
    assert models.load_policy(tmp_path / "a").module.dtype == torch.float32
    loaded = models.load_policy(tmp_path / "a", dtype="bfloat16")
    assert same(loaded.module, module)
    models.save(loaded.module, loaded.tokenizer, tmp_path / "b")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "b"), module)


def test_causal_lm_trunk_gets_a_new_head_only_with_fresh_head(tmp_path: Path) -> None:
    module = causal()
    write_plain(module, tmp_path)
    for load in (models.load_reward, models.load_steps, models.load_value):
        with pytest.raises(ModelError, match=r"contains a policy model, expected .* fresh_head=True"):
            load(tmp_path)  # type: ignore[operator]
    before = torch.get_rng_state()
    reward = models.load_reward(tmp_path, labels=3, fresh_head=True, seed=4)
    torch.rand(3)
    same_seed = models.load_reward(tmp_path, labels=3, fresh_head=True, seed=4)
    other_seed = models.load_reward(tmp_path, labels=3, fresh_head=True, seed=5)
    torch.set_rng_state(before)
    assert same(reward.module, same_seed.module)
    assert not torch.equal(reward.module.score.weight, other_seed.module.score.weight)
    assert reward.module.score.weight.shape == (3, 16)
    assert same(reward.module.model, module.model)
    steps = models.load_steps(tmp_path, fresh_head=True)
    assert steps.module(IDS).logits.shape == (1, 5, 2)
    models.save(steps.module, steps.tokenizer, tmp_path / "s")
    assert same(AutoModelForTokenClassification.from_pretrained(tmp_path / "s"), steps.module)
    assert models.load_any(tmp_path / "s").kind == "steps"


def test_loading_does_not_change_the_random_state(tmp_path: Path) -> None:
    write_plain(causal(), tmp_path)
    before = torch.get_rng_state()
    models.load_reward(tmp_path, fresh_head=True)
    models.new_llama("policy", **SHAPE, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_reward_model_scores_match_plain_transformers(tmp_path: Path) -> None:
    module = classifier()
    write_plain(module, tmp_path)
    loaded = models.load_reward(tmp_path)
    assert torch.equal(loaded.module(IDS).logits, module(IDS).logits)
    models.save(loaded.module, loaded.tokenizer, tmp_path / "again")
    assert same(AutoModelForSequenceClassification.from_pretrained(tmp_path / "again"), module)
    with pytest.raises(ModelError, match="expected a policy"):
        models.load_policy(tmp_path)


def test_number_of_labels_must_match(tmp_path: Path) -> None:
    write_plain(classifier(labels=2), tmp_path)
    with pytest.raises(ModelError, match="scores 2 labels, expected 1; pass labels=2"):
        models.load_reward(tmp_path)
    assert models.load_reward(tmp_path, labels=2).module.num_labels == 2
    assert models.load_any(tmp_path).module.num_labels == 2


def test_a_value_model_round_trips(tmp_path: Path) -> None:
    write_plain(causal(), tmp_path / "a")
    value = models.load_value(tmp_path / "a", fresh_head=True, seed=3)
    models.save(value.module, value.tokenizer, tmp_path / "b")
    reloaded = models.load_any(tmp_path / "b")
    assert reloaded.kind == "value"
    assert same(reloaded.module, value.module)
    assert torch.equal(reloaded.module(IDS), value.module(IDS))
    assert reloaded.module(IDS).shape == (1, 5)
    head = tmp_path / "b" / "value_head.safetensors"
    head.write_bytes(head.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"value_head.safetensors is truncated: tensor 'weight'"):
        models.load_value(tmp_path / "b")


@pytest.mark.parametrize("kind", ["policy", "reward", "steps", "value"])
def test_new_models_depend_only_on_the_seed(kind: str, tmp_path: Path) -> None:
    first = models.new_llama(kind, **SHAPE, seed=1, pad_token_id=256, eos_token_id=258)
    torch.rand(5)
    assert same(first, models.new_llama(kind, **SHAPE, seed=1, pad_token_id=256, eos_token_id=258))
    assert not same(first, models.new_llama(kind, **SHAPE, seed=2, pad_token_id=256, eos_token_id=258))
    models.save(first, byte_tokenizer(), tmp_path / "m")
    loaded = models.load_any(tmp_path / "m")
    assert loaded.kind == kind
    assert same(loaded.module, first)


def test_new_llama_rejects_invalid_kinds_and_shapes() -> None:
    with pytest.raises(ModelError, match="unknown kind of model 'polcy'; did you mean 'policy'"):
        models.new_llama("polcy", **SHAPE, seed=1)
    with pytest.raises(ModelError, match="hidden_size 16 must be a multiple of heads 3"):
        models.new_llama("policy", **{**SHAPE, "heads": 3}, seed=1)


def test_missing_pad_token_becomes_eos_which_still_gets_gradients(tmp_path: Path) -> None:
    write_plain(causal(), tmp_path / "a", byte_tokenizer(pad=None))
    loaded = models.load_policy(tmp_path / "a")
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == loaded.module.config.pad_token_id
    models.save(loaded.module, loaded.tokenizer, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["pad_token_id"] == loaded.tokenizer.eos_token_id
    reloaded = models.load_policy(tmp_path / "b").module
    ids = torch.tensor([[1, loaded.tokenizer.eos_token_id, 2]])
    reloaded(ids).logits.sum().backward()
    assert reloaded.get_input_embeddings().weight.grad[loaded.tokenizer.eos_token_id].abs().sum() > 0


def test_tokenizer_larger_than_the_embedding_is_rejected(tmp_path: Path) -> None:
    write_plain(causal(vocab_size=200), tmp_path)
    with pytest.raises(ModelError, match=r"ids up to 264, the model embeds 200"):
        models.load_policy(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no-such"}, "not a config that transformers accepts"),
        ({"architectures": ["BertForMaskedLM"]}, "names the architecture 'BertForMaskedLM'"),
        ({"architectures": None}, "names the architecture 'None'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .awq."),
    ],
)
def test_unsupported_configs_are_rejected(change: dict[str, object], message: str, tmp_path: Path) -> None:
    write_plain(causal(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelError, match=message) as caught:
        models.load_any(tmp_path)
    assert "\n" not in str(caught.value)


def test_invalid_load_options_are_rejected(tmp_path: Path) -> None:
    write_plain(causal(), tmp_path)
    with pytest.raises(ModelError, match="unknown dtype 'float23'; did you mean 'float32'"):
        models.load_policy(tmp_path, dtype="float23")
    with pytest.raises(ConfigError, match="device = 'cuda:77'"):
        models.load_policy(tmp_path, device="cuda:77")
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(ModelError, match=r"config.json is not JSON"):
        models.load_policy(tmp_path)


def test_loading_and_saving_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = write_plain(causal(), tmp_path / "a")
    capfd.readouterr()
    loaded = models.load_reward(directory, fresh_head=True)
    models.save(loaded.module, loaded.tokenizer, tmp_path / "b")
    models.load_steps(tmp_path / "a", fresh_head=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("stored", "wanted"), [("steps", "reward"), ("reward", "steps")])
def test_trunk_is_reused_for_a_head_of_the_same_name_and_another_shape(
    stored: str, wanted: str, tmp_path: Path
) -> None:
    module = models.new_llama(stored, **SHAPE, seed=1)
    models.save(module, byte_tokenizer(), tmp_path / "judge")
    load = {"reward": models.load_reward, "steps": models.load_steps}[wanted]
    with pytest.raises(ModelError, match=f"contains a {stored} model, expected a {wanted} model"):
        load(tmp_path / "judge")
    loaded = load(tmp_path / "judge", fresh_head=True, seed=3)
    assert same(loaded.module.model, module.model)
    expected = models.new_llama(wanted, **SHAPE, seed=1).score.weight.shape
    assert loaded.module.score.weight.shape == expected
    assert torch.equal(
        loaded.module.score.weight, load(tmp_path / "judge", fresh_head=True, seed=3).module.score.weight
    )
