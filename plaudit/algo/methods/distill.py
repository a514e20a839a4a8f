"""On-policy distillation: the reverse KL to teachers, at what the policy itself has written.

Agarwal et al. (GKD, 2024); by the sampled token as Lu et al. (Thinking Machines, 2025). With weights w of teachers q:
    sampled token  advantage + Σ w (log q - log π_old) of the token drawn; in expectation the gradient of Σ w KL(π, q)
    top-k          Σ w KL(π, q), exactly, over the teacher's k likeliest tokens and all others taken as one
Both may stand beside the reward's advantage, whose weight is 1; `distill` itself has none. Deviations:
1. What a token does to the tokens after it is not charged to it: the discount is 0, as in both papers.
2. log q - log π_old is kept within ±20, as in `kl.py`.
3. The others of top-k keep their mass, which leaving them out, or normalising without them, would let drift.

Shapes: T tokens, M teachers, K tokens of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Estimator, Method, Rewarded
from plaudit.algo.methods.ppo import LOG_RATIO_LIMIT
from plaudit.algo.methods.reinforce import PLAIN

FULL = -1e-7
"""The log of the most that K tokens may have together where others exist: 1 in float32 would leave log 0 for them."""


def towards(teachers_TM: Tensor, old_T: Tensor, weights: Sequence[float]) -> Tensor:
    """(T,): Σ w (log q - log π_old) of the tokens drawn, which is added to the advantage. Without a gradient."""
    apart_TM = (teachers_TM - old_T.detach()[:, None]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return apart_TM @ apart_TM.new_tensor(weights)


def reverse_kl(logp_TK: Tensor, teacher_TK: Tensor, whole: bool) -> Tensor:
    """(T,): KL(π, q) over K tokens and, unless they are the `whole` vocabulary, the others as one."""
    if not whole:
        logp_TK, teacher_TK = _with_others(logp_TK), _with_others(teacher_TK.detach())
    return (logp_TK.exp() * (logp_TK - teacher_TK)).sum(-1)


def top_k_kl(
    logp_TK: Tensor, teachers_TK: Tensor | None, teachers: Sequence[tuple[int, float]], vocabulary: int
) -> Tensor:
    """(T,): Σ w KL(π, q). teachers: how many of the K columns each has, in order, and its weight."""
    assert teachers_TK is not None
    counts = [count for count, _ in teachers]
    kls = [
        weight * reverse_kl(ours, theirs, whole=count == vocabulary)
        for (count, weight), ours, theirs in zip(
            teachers, torch.split(logp_TK, counts, -1), torch.split(teachers_TK, counts, -1), strict=True
        )
    ]
    return torch.stack(kls).sum(0)


def _with_others(logp_TK: Tensor) -> Tensor:
    """(T, K + 1): log(1 - Σ p) behind them."""
    together_T1 = logp_TK.logsumexp(-1, keepdim=True).clamp(max=FULL)
    return torch.cat([logp_TK, (-together_T1.expm1()).log()], -1)


def _nothing(batch: Rewarded) -> Advantages:
    return Advantages(torch.zeros_like(batch.rewards))


METHOD = Method(advantage=Estimator("none", _nothing), loss=PLAIN)
