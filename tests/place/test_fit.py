"""A recipe that does not fit in memory is rejected with the calculation before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest

from plaudit.errors import ConfigError
from plaudit.models import load_policy
from plaudit.place.memory import fit as room
from plaudit.place.memory.fit import available, check_fit, fullest, owners, parameters
from plaudit.rl.loop import RlTraining
from plaudit.train.optim import host_memory
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, recipe

GIB = 1 << 30
BILLION = 1 << 30  # 2^30 weights, so that one byte per weight is a GiB


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model has 2^30 weights."""
    monkeypatch.setattr(room, "parameters", lambda path: BILLION)


def ppo(**tables: Any) -> Any:
    base = {"algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "reward": {"path": "sums", "dtype": "bfloat16"}}
    base["reward"]["device"] = "cuda"
    return recipe(
        **{**base, "model": {"dtype": "bfloat16", "device": "cuda"}, "engine": {"kv_bytes": 8 * GIB}, **tables}
    )


def test_the_parameters_of_a_model_directory_are_counted() -> None:
    module = load_policy("sums-policy").module
    assert parameters("sums-policy") == sum(p.numel() for p in module.parameters())


@pytest.mark.usefixtures("large")
def test_memory_by_owner_by_hand() -> None:
    gibibytes = {name: size // GIB for name, size in owners(ppo(), "cuda").items()}
    assert gibibytes == {
        "policy weights": 2, "policy masters": 4, "policy optimizer": 8, "policy gradients": 4, "reference weights": 2,
        "critic weights": 2, "critic masters": 4, "critic optimizer": 8, "critic gradients": 4, "reward weights": 2,
        "KV": 8,
    }  # fmt: skip
    grpo = owners(
        recipe(algorithm={"name": "grpo", "kl": {"coef": 0.0}}), "cpu"
    )  # a rule as the reward, and a KV pool sized to free memory
    assert {name: size // GIB for name, size in grpo.items()} == {
        "policy weights": 4, "policy optimizer": 8, "policy gradients": 4
    }  # fmt: skip
    lora = owners(recipe(algorithm={"name": "grpo", "kl": {"coef": 0.1}}, model={"lora": {"rank": 4}}), "cpu")
    assert {name: size // GIB for name, size in lora.items()} == {"policy weights": 4}


@pytest.mark.usefixtures("large")
def test_swapped_needs_the_memory_of_its_largest_phase() -> None:
    swapped = {"placement": {"name": "swapped"}}
    phase, needed = fullest(ppo(**swapped), owners(ppo(), "cuda"))
    assert (phase, sum(needed.values()) // GIB) == ('the critic\'s update with placement.name = "swapped"', 2 + 18)
    phase, needed = fullest(ppo(**swapped, train={"minibatches": 2}), owners(ppo(), "cuda"))
    assert (phase, sum(needed.values()) // GIB) == ('the policy\'s update with placement.name = "swapped"', 32)
    sizes = {**owners(ppo(), "cuda"), "KV": 60 * GIB}
    assert fullest(ppo(**swapped), sizes) == (
        'generation with placement.name = "swapped"', {"policy weights": 2 * GIB, "KV": 60 * GIB}
    )  # fmt: skip


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("free", "cure"),
    [
        (30, 'set placement.name = "swapped": then 20 GiB are needed'),
        (15, "no setting makes it fit one device; share it out with resources.data_parallel"),
    ],
)
def test_a_recipe_that_does_not_fit_is_rejected_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, free: int, cure: str
) -> None:
    monkeypatch.setattr(room, "available", lambda device: free * GIB)
    with pytest.raises(ConfigError) as refused:
        check_fit(ppo())
    assert str(refused.value).startswith('placement.name = "colocated" needs policy weights 2 + policy masters 4 + ')
    assert f"+ KV 8 = 44 GiB, without activations, and cuda has {free} GiB free: {cure}" in str(refused.value)
    monkeypatch.setattr(room, "available", lambda device: 44 * GIB)
    check_fit(ppo())


@pytest.mark.usefixtures("large")
def test_suggested_fixes_for_swapped_and_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = ppo(placement={"name": "swapped"}, engine={"kv_bytes": 30 * GIB})
    monkeypatch.setattr(room, "available", lambda device: 25 * GIB)
    with pytest.raises(ConfigError, match=r"set a smaller engine\.kv_bytes \(now 30 GiB\): then 20 GiB are needed"):
        check_fit(swapped)
    grpo = recipe(algorithm={"name": "grpo", "kl": {"coef": 0.1}})
    monkeypatch.setattr(room, "available", lambda device: 5 * GIB)
    with pytest.raises(ConfigError, match=r"set model\.lora, which trains few weights.*: then 4 GiB are needed"):
        check_fit(grpo)


@pytest.mark.usefixtures("large")
def test_offloaded_state_must_fit_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = ppo(train={"offload_optimizer": True})
    monkeypatch.setattr(room, "available", lambda device: 100 * GIB)
    monkeypatch.setattr(host_memory, "free_memory", lambda: 24 * GIB)
    check_fit(offloaded)
    monkeypatch.setattr(host_memory, "free_memory", lambda: 23 * GIB)
    with pytest.raises(ConfigError) as refused:
        check_fit(offloaded)
    parts = "policy masters 4 + policy optimizer 8 + critic masters 4 + critic optimizer 8 = 24 GiB into host memory"
    assert str(refused.value).startswith(f"train.offload_optimizer puts {parts}: 24 GiB on ")
    assert "which has 23 GiB free; train with model.lora, or over more machines" in str(refused.value)


def test_a_run_that_does_not_fit_is_rejected_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available", lambda device: 1000)
    tree = recipe()
    with Run(tmp_path / "run", tree) as run, pytest.raises(ConfigError, match="GiB free"):
        RlTraining(tree, run, Silent())


def test_available_memory_of_this_machine_is_plausible() -> None:
    free = available("cpu")
    assert free is None or free > 1 << 20
    check_fit(recipe())
