"""RL methods by name, one file each: its paper, its default settings, its advantage and its loss."""

from __future__ import annotations

from plaudit.algo.method import Estimator, Loss, Method
from plaudit.algo.methods import (
    cispo,
    dapo,
    distill,
    dr_grpo,
    expert_iteration,
    grpo,
    gspo,
    online_dpo,
    ppo,
    reinforce,
    reinforce_plus,
    rloo,
    tree_grpo,
)  # fmt: skip

METHODS: dict[str, Method] = {
    "ppo": ppo.METHOD,
    "reinforce": reinforce.METHOD,
    "reinforce++": reinforce_plus.METHOD,
    "reinforce++-baseline": reinforce_plus.WITH_BASELINE,
    "rloo": rloo.METHOD,
    "grpo": grpo.METHOD,
    "dr-grpo": dr_grpo.METHOD,
    "tree-grpo": tree_grpo.METHOD,
    "dapo": dapo.METHOD,
    "gspo": gspo.METHOD,
    "cispo": cispo.METHOD,
    "expert-iteration": expert_iteration.METHOD,
    "online-dpo": online_dpo.METHOD,
    "distill": distill.METHOD,
}


def estimators() -> dict[str, Estimator]:
    return {method.advantage.name: method.advantage for method in METHODS.values()}


def losses() -> dict[str, Loss]:
    return {loss.name: loss for method in METHODS.values() for loss in (method.loss, *method.more_losses)}
