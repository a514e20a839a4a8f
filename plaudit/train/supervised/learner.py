"""One update from a batch of examples. Splitting it into micro-batches or over ranks does not change the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from plaudit.errors import RunError
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.pipeline import Made
from plaudit.train.optim.repeatable import repeatable
from plaudit.train.optim.sharding import free_gathered
from plaudit.train.policy.forward import MicroBatch
from plaudit.train.run.ranks import ALONE, Ranks
from plaudit.train.supervised.examples import Example, shares, token_count
from plaudit.train.supervised.objectives import Objective
from plaudit.train.supervised.reader import Reader


class Learner:
    def __init__(
        self, model: nn.Module, objective: Objective, optimizer: Optimizer, micro_batch_tokens: int,
        deterministic: bool = True, ranks: Ranks = ALONE, lanes: int = 1,
    ) -> None:  # fmt: skip
        """`lanes`: the number of parts of a batch that a single rank computes at once, in threads; their gradients are
        summed in order."""
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.reader = Reader(model, micro_batch_tokens, ranks)
        self.deterministic = deterministic
        self.lane = Reader(model, max(1, micro_batch_tokens // lanes), ranks)
        self.lanes = lanes
        self._threads = ThreadPoolExecutor(lanes, "lane") if lanes > 1 else None

    def gradient(self, examples: Sequence[Example]) -> float:
        """Compute the gradients of the batch's mean loss; return the loss."""
        self.optimizer.zero()
        count = self._count(examples)
        losses: list[Tensor] = []
        self.objective.begin(self.reader, examples)
        if self._threads is not None:
            return self._in_threads(self._threads, examples, count)

        def forward(batch: MicroBatch) -> Made:
            out, loss = self._pass(examples, batch)
            if loss is None:
                return out, nullcontext
            loss = loss / count if batch.counts else loss * 0.0
            losses.append(loss.detach())
            return loss, nullcontext

        with repeatable(self.reader.device, self.deterministic):
            self.reader.stage.learn(self.reader.batches(examples), forward)
        return self._total(losses)

    def _in_threads(self, threads: ThreadPoolExecutor, examples: Sequence[Example], count: int) -> float:
        parameters = list(self.optimizer.parameters.values())

        def gradients(part: Sequence[Example]) -> tuple[float, list[Tensor | None]]:
            total = 0.0
            summed: list[Tensor | None] = [None] * len(parameters)
            for batch in self.lane.batches(part):
                loss = self._pass(part, batch)[1]
                assert loss is not None
                of_batch = torch.autograd.grad(loss / count, parameters, allow_unused=True)
                summed = [b if a is None else a if b is None else a + b for a, b in zip(summed, of_batch, strict=True)]
                total += loss.item() / count
            return total, summed

        losses = []
        for loss, of_part in threads.map(gradients, shares(examples, self.lanes)):
            losses.append(loss)
            for parameter, gradient in zip(parameters, of_part, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return sum(losses)

    def update(self, examples: Sequence[Example], step: int) -> dict[str, float]:
        loss = self.gradient(examples)
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {step}: the weights are left as they were; lower train.lr "
                "(--resume --set train.lr=…)"
            )
        seen = {"loss": loss, **self.figures()}
        return {**seen, **self.optimizer.step(step), "tokens": float(sum(map(token_count, examples)))}

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example]) -> float:
        self.objective.begin(self.reader, examples)
        passed = [(batch, self._pass(examples, batch)[1]) for batch in self.reader.batches(examples)]
        free_gathered(self.model)
        losses = [loss for batch, loss in passed if loss is not None and batch.counts]
        return self._total(losses) / self._count(examples)

    def figures(self) -> dict[str, float]:
        """The objective's metrics of the last batch, besides the loss."""
        return self.objective.figures(self.reader.results)

    def _pass(self, examples: Sequence[Example], batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """The rows of a micro-batch and, on the last stage, its summed loss."""
        items = [examples[i] for i in batch.indices]
        places = self.objective.pack(self.reader, items)
        hidden = self.reader.rows(places)
        if not self.reader.stage.last:
            return hidden, None
        loss = self.objective.loss(self.model, items, places, hidden)
        if batch.counts:
            self.objective.note()
        return hidden, loss

    def _total(self, losses: Sequence[Tensor]) -> float:
        total: float = sum(self.reader.results.gather_values(sum(loss.item() for loss in losses), float))
        return total

    def _count(self, examples: Sequence[Example]) -> int:
        count = self.objective.count(examples)
        if count == 0:
            raise RunError(f"a batch of {len(examples)} example(s) has nothing to learn from: no target in any of them")
        return count
