"""π_old, the policy's log-probs before the first update of a step, with or without a forward pass of the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plaudit.config import RlRecipe
from plaudit.records import Batch
from plaudit.train.policy.experience import Experience, minibatches
from plaudit.train.policy.policy import Policy
from plaudit.train.run.clock import Clock


class OldLogprobs:
    """`exact`: the engine's log-probs had the learner's bits when they were last compared, so they save the pass. The
    first minibatch of every step compares them again, in its own forward pass; `differed`: once it saw another bit, and
    the pass is taken from then on."""

    def __init__(self, recipe: RlRecipe, policy: Policy, clock: Clock, kl_in_reward: bool) -> None:
        self.recipe = recipe
        self.policy = policy
        self.clock = clock
        masks = recipe.algorithm.correction.mode == "mask"  # what it leaves is the denominator of the whole batch
        self.needed = recipe.train.epochs * recipe.train.minibatches > 1 or kl_in_reward or masks
        self.exact = self.differed = False

    def of(self, batch: Batch, step: int, behaviour: Tensor, own: Tensor) -> Tensor | None:
        """Return None if the first forward pass gives them anyway: the first update's ratio is then 1 by construction.

        Taken in the first epoch's own micro-batches, so that they are equal to the bit to what that epoch computes."""
        train, samples = self.recipe.train, batch.samples
        self.exact = self.exact and _fresh(batch)
        if self.recipe.algorithm.old_logprobs == "engine":
            return behaviour
        if not self.needed:
            return None
        if self.exact:
            return behaviour
        with self.clock("old"):
            ends = torch.tensor([len(sample.token_ids) for sample in samples]).cumsum(0).tolist()
            old = torch.empty(ends[-1])
            order = f"{self.recipe.seed} {step} 0"
            for indices in minibatches(len(samples), train.minibatches, order, self.policy.together):
                rows = [torch.arange(ends[i] - len(samples[i].token_ids), ends[i]) for i in indices]
                old[torch.cat(rows)] = self.policy.logprobs([samples[i] for i in indices])
        decoder = self.policy.decoder
        promised = decoder.device.type == "cuda" or decoder.dtype == torch.float32  # elsewhere equality would be chance
        self.exact = promised and not self.differed and _fresh(batch) and torch.equal(old[own], behaviour[own])
        return old

    def first(self, part: Experience) -> Experience:
        """Prepare the first minibatch for training."""
        if not part.old_is_engines:
            return part
        return replace(part, unmoved=True, old=None if self.exact else part.old)

    def compared(self, metrics: Mapping[str, float]) -> None:
        """One token that differs brings the pass back. For good: where a forward pass with gradients has other kernels
        than one without, only the second would be equal again."""
        if self.exact and metrics.get("mismatch/abs_max", 0.0) != 0:
            self.exact, self.differed = False, True


def _fresh(batch: Batch) -> bool:
    """Whether all tokens were sampled with the current weights."""
    return all({*sample.versions} <= {batch.version} for sample in batch.samples)
