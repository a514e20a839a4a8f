"""REINFORCE++, with and without a group's mean as baseline: advantages whitened over the batch.

Hu (2025). Deviations:
1. Whitened over the whole batch, all ranks and micro-batches, not per micro-batch.
"""

from __future__ import annotations

from plaudit.algo.method import Method
from plaudit.algo.methods.grpo import GROUP
from plaudit.algo.methods.ppo import CLIP
from plaudit.algo.methods.reinforce import RETURN

METHOD = Method(
    advantage=RETURN,
    loss=CLIP,
    preset={"advantage": {"whiten": True}, "kl": {"coef": 0.01, "where": "reward", "estimator": "k1"}},
)
WITH_BASELINE = Method(
    advantage=GROUP,
    loss=CLIP,
    preset={"advantage": {"whiten": True}, "kl": {"coef": 0.01, "where": "loss", "estimator": "k2"}},
)
