"""Muon's step, compared with torch's own, and its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plaudit.config.supervised import SupervisedTrain
from plaudit.train.optim.muon import Muon, orthogonal
from plaudit.train.optim.sharded_optimizer import new_optimizer

TOKENS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def table(**options: Any) -> SupervisedTrain:
    plain = {"steps": 10, "lr": 1e-3, "batch": 2, "optimizer": "muon", "warmup": 0, "schedule": "constant"}
    return SupervisedTrain(**{**plain, "clip_norm": 1e9, "weight_decay": 0.1, **options})


def differentiate(model: LlamaForCausalLM) -> None:
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()


@pytest.mark.parametrize("shape", [(1, 7, 20), (3, 20, 7), (2, 16, 16)])
def test_orthogonal_keeps_directions_and_evens_singular_values(shape: tuple[int, int, int]) -> None:
    """Compared by singular values in float64: the polynomial changes them, and nothing else."""
    x = torch.randn(shape)
    u, sizes, vh = torch.linalg.svd(x.double(), full_matrices=False)
    new = sizes / sizes.norm(dim=1, keepdim=True)
    for _ in range(5):
        new = 3.4445 * new - 4.775 * new**3 + 2.0315 * new**5
    torch.testing.assert_close(orthogonal(x).double(), u @ torch.diag_embed(new) @ vh, rtol=0, atol=1e-4)
    assert new.median() > 0.6
    assert new.max() < 1.3


def test_steps_equal_those_of_torch() -> None:
    """Up to the rounding of bfloat16, in which torch orthogonalizes its steps."""
    actual, reference = tiny(), tiny()
    optimizer = new_optimizer(actual, table())
    assert isinstance(optimizer, Muon)
    other_parameters = {n: p for n, p in reference.named_parameters() if n not in optimizer.momentum}
    assert sorted(name.split(".")[-2] for name in other_parameters) == [
        "embed_tokens", "input_layernorm", "input_layernorm", "lm_head", "norm", "post_attention_layernorm",
        "post_attention_layernorm",
    ]  # fmt: skip
    muon = torch.optim.Muon(
        [p for n, p in reference.named_parameters() if n in optimizer.momentum], lr=1e-3, weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adam = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in other_parameters.values()], lr=1e-3,
        betas=(0.9, 0.95),
    )  # fmt: skip
    initial = copy.deepcopy(dict(actual.named_parameters()))
    for step in range(4):
        for model in (actual, reference):
            differentiate(model)
        optimizer.step(step)
        muon.step()
        adam.step()
    for (name, a), b in zip(actual.named_parameters(), reference.parameters(), strict=True):
        moved = (b - initial[name]).norm()
        assert (a - b).norm() < (0.2 if name in optimizer.momentum else 1e-3) * moved, name


def test_step_from_a_saved_state_is_equal() -> None:
    unbroken = tiny()
    optimizer = new_optimizer(unbroken, table())
    for step in range(3):
        if step == 2:
            resumed = copy.deepcopy(unbroken)
            saved = {name: value.clone() for name, value in optimizer.state().items()}
        differentiate(unbroken)
        optimizer.step(step)
    resumed_optimizer = new_optimizer(resumed, table())
    resumed_optimizer.load(saved)
    differentiate(resumed)
    resumed_optimizer.step(2)
    assert all(torch.equal(a, b) for a, b in zip(unbroken.parameters(), resumed.parameters(), strict=True))


def test_muon_with_an_offloaded_optimizer_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs whole matrices"):
        table(offload_optimizer=True)
