"""One update from a batch of examples, split into micro-batches that do not change the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from plaudit.errors import RunError
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.repeatable import repeatable
from plaudit.train.supervised.examples import Example, micro_batches, token_count
from plaudit.train.supervised.objectives import Objective


class Learner:
    def __init__(
        self, model: nn.Module, objective: Objective, optimizer: Optimizer, micro_batch_tokens: int,
        deterministic: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.deterministic = deterministic

    def gradient(self, examples: Sequence[Example]) -> float:
        """Fill the gradients with those of the batch's mean loss; returns the loss."""
        self.optimizer.zero()
        count = self._count(examples)
        loss = 0.0
        micros = micro_batches(examples, self.micro_batch_tokens)
        self.objective.begin(self.model, micros)
        for micro in micros:
            with repeatable(next(self.model.parameters()).device, self.deterministic):
                part = self.objective.loss(self.model, micro) / count
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        return loss

    def update(self, examples: Sequence[Example], step: int) -> dict[str, float]:
        loss = self.gradient(examples)
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {step}: the weights are left as they were; lower train.lr "
                "(--resume --set train.lr=…)"
            )
        seen = {"loss": loss, **self.objective.figures()}
        return {**seen, **self.optimizer.step(step), "tokens": float(sum(map(token_count, examples)))}

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example]) -> float:
        micros = micro_batches(examples, self.micro_batch_tokens)
        self.objective.begin(self.model, micros)
        return sum(self.objective.loss(self.model, micro).item() for micro in micros) / self._count(examples)

    def _count(self, examples: Sequence[Example]) -> int:
        count = self.objective.count(examples)
        if count == 0:
            raise RunError(f"a batch of {len(examples)} example(s) has nothing to learn from: no target in any of them")
        return count
