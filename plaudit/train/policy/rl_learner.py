"""One training step on a batch: reference, values, advantages, then the updates of policy and critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from plaudit.algo.correction import importance_weights
from plaudit.algo.kl import AdaptiveKl, kl_estimate
from plaudit.algo.methods.ppo import explained_variance
from plaudit.algo.rewards import RunningNorm
from plaudit.algo.tokens.ragged import repeat, sample_sum
from plaudit.config import RlRecipe
from plaudit.errors import RunError
from plaudit.records import Batch, Sample
from plaudit.train.optim.optimizer import NotFinite, Optimizer
from plaudit.train.optim.repeatable import repeatable
from plaudit.train.policy.advantages import estimate, shaped, usable
from plaudit.train.policy.critic import Critic, LocalCritic, SharedCritic
from plaudit.train.policy.experience import Experience, flat, minibatches, own_tokens, pairs
from plaudit.train.policy.old_logprobs import OldLogprobs
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.reference import Reference
from plaudit.train.policy.tally import Tally
from plaudit.train.policy.teachers import Taught, Teachers
from plaudit.train.run.clock import Clock


class RlLearner:
    def __init__(
        self, recipe: RlRecipe, policy: Policy, optimizer: Optimizer, critic: Critic | None,
        reference: Reference | None, clock: Clock, teachers: Teachers | None = None,
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.algorithm = recipe.algorithm
        self.policy = policy
        self.optimizer = optimizer
        self.critic = critic
        self.reference = reference
        self.teachers = teachers
        self.clock = clock
        kl = recipe.algorithm.kl
        self.kl = AdaptiveKl(kl.coef, kl.target, kl.horizon)
        self.norm = RunningNorm() if recipe.algorithm.shaping.normalise else None
        self.old = OldLogprobs(recipe, policy, clock, reference is not None and kl.where == "reward")

    def update(self, batch: Batch, step: int) -> tuple[dict[str, float], Experience | None]:
        """Train on a batch. Return metrics, and the experience, or None if no sample is usable."""
        samples = usable(batch.samples, self.algorithm.grouped)
        metrics = dropped(batch.samples, samples)
        if not samples:
            return metrics, None
        rewards = shaped(self.algorithm.shaping, samples, self.recipe.sampling.max_tokens, self.norm)
        metrics["shaped_reward/mean"] = rewards.mean().item()
        if self.algorithm.paired:
            samples, rewards = pairs(samples, rewards)
            metrics["pairs/count"] = len(samples) / 2
            if not samples:
                return metrics, None
        experience, figures = self._experience(Batch(samples, batch.version), rewards, step)
        metrics |= figures
        seen, updates, train, together = Tally(), 0, self.recipe.train, self.policy.together
        for epoch in range(train.epochs):
            for indices in minibatches(len(samples), train.minibatches, f"{self.recipe.seed} {step} {epoch}", together):
                part = experience.select(indices)
                seen.merge(self._minibatch(part if updates else self.old.first(part), step))
                updates += 1
        metrics |= {"policy/updates": float(updates), **seen.metrics(updates)}
        self.old.compared(metrics)
        return metrics, experience

    def state(self) -> dict[str, Any]:
        norm = None if self.norm is None else self.norm.state()
        return {"kl": self.kl.state(), "norm": norm, "exact": self.old.exact, "differed": self.old.differed}

    def load(self, state: dict[str, Any]) -> None:
        self.kl.load(state["kl"])
        self.old.exact, self.old.differed = state.get("exact", False), state.get("differed", False)
        if self.norm is not None and state["norm"] is not None:
            self.norm.load(state["norm"])

    def _experience(self, batch: Batch, rewards: Tensor, step: int) -> tuple[Experience, dict[str, float]]:
        samples, algorithm = batch.samples, self.algorithm
        own = own_tokens(samples)
        behaviour, kept = flat(samples, "behaviour"), None
        old = self.old.of(batch, step, behaviour, own)
        reference = values = after = None
        if self.reference is not None:
            with self.clock("reference"):
                reference = self.reference.logprobs(samples)
        taught = Taught()
        if self.teachers is not None:
            with self.clock("teachers"):
                taught = self.teachers.read(samples)
        if self.critic is not None:
            with self.clock("values"):
                values, after = self.critic.values(samples)
        with self.clock("advantages"):
            estimated = estimate(
                algorithm, samples, rewards, kl_coef=self.kl.coef, old=old, reference=reference, values=values,
                after=after,
            )  # fmt: skip
        mask, lengths = own, [len(sample.token_ids) for sample in samples]
        if algorithm.mask_truncated:
            ended = torch.tensor([sample.finish_reason != "length" for sample in samples])
            mask = own & repeat(ended, lengths)
        if (c := algorithm.correction).mode == "mask":
            assert old is not None
            _, kept = importance_weights(old, behaviour, mask, lengths, c.mode, c.level, c.cap, c.floor)
        experience = Experience(
            samples, mask, behaviour, estimated.advantages, old, reference, values, estimated.returns,
            estimated.token_rewards, kept, *taught.arrays, old_is_engines=old is behaviour,
        )  # fmt: skip
        return experience, self._describe(experience, own) | taught.figures

    def _minibatch(self, experience: Experience, step: int) -> Tally:
        seen = Tally()
        learn = self.recipe.critic is None or step >= self.recipe.critic.warmup
        try:
            with self.clock("update"), self.repeatable():
                self.optimizer.zero()
                if learn:
                    seen = self.policy.gradient(experience, self.kl.coef)
                    loss = seen.sum("policy/loss")
                    if not math.isfinite(loss):
                        raise NotFinite(
                            f"the loss is {loss} at step {step}: the weights are unchanged; continue with half "
                            f"the learning rate: --resume --set train.lr={self.recipe.train.lr / 2:g}"
                        )
                    for name, value in self.optimizer.step(step).items():
                        seen.weighted(f"policy/{name}", value, 1)
                elif isinstance(self.critic, SharedCritic):  # critic warmup trains only the head
                    seen = self.critic.gradient(experience)
                    self.optimizer.step(step)
            if isinstance(self.critic, LocalCritic):  # so that gradients of the two do not mix
                self.optimizer.drop()
            if self.critic is not None:
                with self.clock("critic"), self.repeatable():
                    seen.merge(self.critic.update(experience, step))
            if isinstance(self.critic, LocalCritic):
                self.critic.optimizer.drop()
        except NotFinite as error:
            if self.recipe.train.non_finite == "halt":
                raise RunError(f"{error}; or --resume --set train.non_finite=skip") from error
            seen = Tally()
            seen.add("dropped/updates", torch.tensor(1.0))
        return seen

    def repeatable(self) -> AbstractContextManager[None]:
        return repeatable(self.policy.decoder.device, self.recipe.train.deterministic)

    def _describe(self, experience: Experience, own: Tensor) -> dict[str, float]:
        metrics = {
            "advantage/mean": experience.advantages[own].mean().item(),
            "advantage/min": experience.advantages[own].min().item(),
            "advantage/max": experience.advantages[own].max().item(),
            "advantage/zero": (experience.advantages[own] == 0).float().mean().item(),
            "kl/coef": self.kl.coef,
        }
        if experience.returns is not None and experience.values is not None:
            returns = experience.returns[own]
            metrics |= {f"return/{name}": getattr(returns, name)().item() for name in ("mean", "min", "max")}
            metrics["value/mean"] = experience.values[own].mean().item()
            metrics["value/explained_variance"] = explained_variance(experience.values, experience.returns, own)
        if experience.reference is not None:
            policy = experience.behaviour if experience.old is None else experience.old
            kl = torch.where(own, kl_estimate(policy, experience.reference, "k1"), 0.0)
            per_sample = sample_sum(kl, experience.lengths).mean().item()
            metrics["kl/reference"] = kl[own].mean().item()
            metrics["kl/reference_per_response"] = per_sample
            self.kl.update(per_sample, len(experience.samples))
        return metrics


def dropped(samples: Sequence[Sample], used: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of unusable samples: their number, and whether long ones are dropped more often."""
    kept = {id(sample) for sample in used}
    lost = [len(sample.token_ids) for sample in samples if id(sample) not in kept]
    figures = {"dropped/samples": float(len(lost))}
    return figures | {"dropped/length_mean": sum(lost) / len(lost)} if lost else figures
