"""On-policy distillation: the reverse KL to teachers on the policy's own samples.

Agarwal et al. (GKD, 2024); by the sampled token as Lu et al. (Thinking Machines, 2025). With weights w of teachers q:
    sampled token  advantage + Σ w (log q - log π_old) of the sampled token; in expectation the gradient of Σ w KL(π, q)
    top-k          Σ w KL(π, q), exactly, over the teacher's k likeliest tokens with all others merged into one
Both can be combined with the reward's advantage, whose weight is 1; `distill` itself has none. Deviations:
1. A token is not credited with its effect on later tokens: the discount is 0, as in both papers.
2. log q - log π_old is clamped to ±20, as in `kl.py`.
3. Tokens outside the top-k keep their mass, which would drift if they were left out or normalised away.

Shapes: T tokens, M teachers, K tokens of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Estimator, Method, RewardBatch
from plaudit.algo.methods.ppo import LOG_RATIO_LIMIT
from plaudit.algo.methods.reinforce import PLAIN

FULL = -1e-7
"""Log of the maximum mass of K tokens if others exist: a mass of 1 in float32 would leave log 0 for the others."""


def towards(teachers_TM: Tensor, old_T: Tensor, weights: Sequence[float]) -> Tensor:
    """Return Σ w (log q - log π_old) (T,) of the sampled tokens, to add to the advantage. Without a gradient."""
    apart_TM = (teachers_TM - old_T.detach()[:, None]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return apart_TM @ apart_TM.new_tensor(weights)


def reverse_kl(logp_TK: Tensor, teacher_TK: Tensor, whole: bool) -> Tensor:
    """Return KL(π, q) (T,) over K tokens and, unless they are the `whole` vocabulary, the others merged into one."""
    if not whole:
        logp_TK, teacher_TK = _with_others(logp_TK), _with_others(teacher_TK.detach())
    return (logp_TK.exp() * (logp_TK - teacher_TK)).sum(-1)


def top_k_kl(
    logp_TK: Tensor, teachers_TK: Tensor | None, teachers: Sequence[tuple[int, float]], vocabulary: int
) -> Tensor:
    """Return Σ w KL(π, q) (T,). teachers: number of the K columns of each teacher, in order, and its weight."""
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
    """Append log(1 - Σ p): (T, K + 1)."""
    together_T1 = logp_TK.logsumexp(-1, keepdim=True).clamp(max=FULL)
    return torch.cat([logp_TK, (-together_T1.expm1()).log()], -1)


def _nothing(batch: RewardBatch) -> Advantages:
    return Advantages(torch.zeros_like(batch.rewards))


METHOD = Method(advantage=Estimator("none", _nothing), loss=PLAIN)
