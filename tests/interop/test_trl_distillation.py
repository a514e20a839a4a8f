"""Our reverse KL and TRL's GKD give the same loss and gradient for the same logits."""

from __future__ import annotations

import pytest
import torch

from plaudit.algo.methods.distill import top_k_kl
from plaudit.algo.tokens.columns import column_logprobs, likeliest
from tests.interop.environments import run_client

pytestmark = pytest.mark.interop

ROWS, VOCABULARY, K, TEMPERATURE = 12, 20, 5, 0.8


def test_loss_and_gradient() -> None:
    draw = torch.Generator().manual_seed(4)
    student, teacher = (2 * torch.randn(ROWS, VOCABULARY, generator=draw) for _ in range(2))
    inputs = {"student": student.tolist(), "teacher": teacher.tolist(), "temperature": TEMPERATURE, "k": K}
    theirs = run_client(".venv-interop", "trl_distillation", inputs, 400)
    identity = torch.eye(VOCABULARY)  # a head whose logits are the rows themselves
    for name, count in (("whole", VOCABULARY), ("top_k", K)):
        logits = student.clone().requires_grad_()
        ids, logp = likeliest(teacher, identity, count, VOCABULARY, temperature=TEMPERATURE)
        ours = column_logprobs(logits, identity, ids, temperature=TEMPERATURE)
        loss = top_k_kl(ours, logp, [(count, 1.0)], VOCABULARY).mean()
        loss.backward()
        expected, diff = theirs[name], (logits.grad - torch.tensor(theirs[name]["gradient"])).abs().max().item()
        print(f"{name:6} loss {loss:+.7f} TRL {expected['loss']:+.7f} gradient {diff:.1e}")
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        assert diff < 1e-6
