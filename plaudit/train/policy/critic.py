"""Critics: predict the value of a response at each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from plaudit.algo.aggregate import token_weights
from plaudit.algo.methods.ppo import value_clipped, value_loss
from plaudit.core.model.packing import send, use_packed_attention
from plaudit.models import ValueModel, save
from plaudit.records import Sample
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.pipeline import Made, stage_of
from plaudit.train.optim.shard_files import save_shards
from plaudit.train.optim.sharding import Shards, free_gathered
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.forward import (
    MicroBatch,
    hidden_of,
    micro_batches,
    pack_responses,
    read_values,
    replaying,
    values_of,
)
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.tally import Tally
from plaudit.train.run.ranks import ONE, Group

OPTIMIZER = "critic-optimizer.safetensors"


class Critic(Protocol):
    def values(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the values before each response token (T,), and after each sample's last (N,)."""

    def update(self, experience: Experience, step: int) -> Tally:
        """Update from one minibatch's returns."""

    def save(self, directory: Path) -> None:
        """Save the critic's whole state."""

    def load(self, directory: Path) -> None: ...


class LocalCritic:
    """A separate model, in this process or, with `shards`, over its ranks; samples are split over `group`, and the row
    of each micro-batch over `context`."""

    def __init__(
        self, model: ValueModel, tokenizer: PreTrainedTokenizerFast, optimizer: Optimizer, *, clip: float | None,
        micro_batch_tokens: int, shards: Shards | None = None, group: Group = ONE, context: Group = ONE,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        self.clip = clip
        self.micro_batch_tokens = micro_batch_tokens
        self.shards = shards
        self.group = group
        self.context = context
        self.device = next(model.parameters()).device

    def values(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        return read_values(
            self.model, self.model.score, samples, self.micro_batch_tokens, self.group, context=self.context
        )

    def gradient(self, experience: Experience) -> Tally:
        """Add the gradient of a minibatch's value loss to the parameters'."""
        use_packed_attention(self.model)
        tally = Tally()
        weights = token_weights(experience.mask, experience.lengths, "token")
        stage = stage_of(self.model)

        def forward(batch: MicroBatch) -> Made:
            part = experience.select(batch.indices)
            assert part.values is not None
            assert part.returns is not None
            rows = experience.rows(batch.indices[0], batch.indices[-1])
            responses = pack_responses(part.samples, self.device, context=self.context)
            hidden = hidden_of(self.model, responses)
            if not stage.last:
                return hidden, nullcontext
            values, _ = values_of(self.model.score, responses, hidden)
            old, returns, mask = (each.to(self.device) for each in (part.values, part.returns, part.mask))
            weighted = weights[rows].to(self.device) * float(batch.counts)
            loss = (weighted * value_loss(values, old, returns, self.clip)).sum()
            if batch.counts:
                tally.add("value/loss", loss)
                if self.clip is not None:
                    tally.mean("value/clip", value_clipped(values.detach(), old, returns, self.clip).float(), mask)
            return loss, nullcontext

        stage.learn(micro_batches(experience.samples, self.micro_batch_tokens, self.group), forward)
        return tally.gathered(stage.results(self.group))

    def update(self, experience: Experience, step: int) -> Tally:
        self.optimizer.zero()
        tally = self.gradient(experience)
        norm = self.optimizer.step(step)["grad_norm"]
        tally.weighted("value/grad_norm", norm, 1)
        return tally

    def save(self, directory: Path) -> None:
        if self.shards is None:
            save(self.model, self.tokenizer, directory / "critic")
        else:
            save_shards(self.shards, self.tokenizer, directory / "critic")
        self.optimizer.save(directory / OPTIMIZER)

    def load(self, directory: Path) -> None:
        """Load the optimizer's state; the constructor loaded the model from `directory` / "critic"."""
        self.optimizer.restore(directory / OPTIMIZER)


class SharedCritic:
    """A value head on the policy's trunk, trained in the policy's update."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def values(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        return self.policy.values(samples)

    def gradient(self, experience: Experience) -> Tally:
        """Add the head's gradient; the trunk, which is the policy's, gets none."""
        policy = self.policy
        use_packed_attention(policy.module)
        tally, device = Tally(), policy.decoder.device
        weights = token_weights(experience.mask, experience.lengths, "token")
        for batch in micro_batches(experience.samples, policy.micro_batch_tokens, policy.group):
            rows = experience.rows(batch.indices[0], batch.indices[-1])
            samples = [experience.samples[i] for i in batch.indices]
            responses = pack_responses(samples, device, policy.routing, policy.context)
            with torch.no_grad(), replaying(policy.routing, responses):
                hidden = hidden_of(policy.module, responses)
            if not policy.stage.last:
                continue
            part = experience.select(batch.indices).on(device)
            counted = send((weights[rows] * float(batch.counts)).numpy(), device)
            loss = policy.value_loss(part, responses, hidden, counted, tally if batch.counts else Tally())
            (policy.value_coef * loss).backward()  # type: ignore[no-untyped-call]
        free_gathered(policy.module)
        return tally.gathered(policy.stage.results(policy.group))

    def update(self, experience: Experience, step: int) -> Tally:
        """Do nothing: the head is trained with the policy."""
        return Tally()

    def save(self, directory: Path) -> None:
        """Do nothing: the head is saved with the policy's optimizer, which has it among its parameters."""

    def load(self, directory: Path) -> None: ...
