"""What is learned: each objective turns examples into a summed loss and the count it is to be divided by.

The learner divides by the count of the whole batch, so the gradient is the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.supervised_losses import attribute_error, bradley_terry, step_cross_entropy
from plaudit.algo.tokens.logprobs import token_logprobs
from plaudit.config import BradleyTerry
from plaudit.core.model.attention import rows_at
from plaudit.core.model.fused import fused_rows
from plaudit.core.model.packing import pack, pack_tree, send
from plaudit.train.supervised.examples import Comparison, Demonstration, Example, Rating, StepTargets


class Objective(Protocol):
    def count(self, examples: Sequence[Example]) -> int:
        """How many things the loss is a mean of."""

    def loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        """The loss summed over those things."""

    def begin(self, model: nn.Module, batch: Sequence[Sequence[Example]]) -> None:
        """Look at all micro-batches of a batch, if the loss of one depends on the others."""
        return

    def figures(self) -> dict[str, float]:
        """What was seen since `begin`, besides the loss."""
        return {}


class Imitate(Objective):
    """SFT: the mean negative log-probability of response tokens."""

    def count(self, examples: Sequence[Example]) -> int:
        return sum(len(e.tokens) - e.answer_at for e in examples if isinstance(e, Demonstration))

    def loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        demonstrations = [e for e in examples if isinstance(e, Demonstration)]
        packed = pack([e.tokens for e in demonstrations], _device(model), lone=False)
        targets = [
            start + position
            for start, e in zip(packed.starts, demonstrations, strict=True)
            for position in range(e.answer_at, len(e.tokens))
        ]
        at = torch.tensor(targets, device=packed.input_ids.device)
        hidden = fused_rows(model, packed)[at - 1]  # the token at t is predicted by the row at t - 1
        head = model.get_output_embeddings()  # type: ignore[operator]
        return -token_logprobs(hidden, head.weight, packed.input_ids[0, at], head.bias).sum()


class Prefer(Objective):
    """Bradley–Terry on pairs."""

    def __init__(self, algorithm: BradleyTerry) -> None:
        self.algorithm = algorithm

    def count(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        pairs = [e for e in examples if isinstance(e, Comparison)]
        scores = outcome_scores(model, [e.chosen for e in pairs] + [e.rejected for e in pairs])[:, 0]
        margin = torch.tensor([e.margin for e in pairs], device=scores.device) if self.algorithm.use_margins else None
        return bradley_terry(scores[: len(pairs)], scores[len(pairs) :], margin, self.algorithm.centring)


class Rate(Objective):
    """Squared error against ratings, one per attribute."""

    def count(self, examples: Sequence[Example]) -> int:
        return sum(r == r for e in examples if isinstance(e, Rating) for r in e.ratings)

    def loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        rated = [e for e in examples if isinstance(e, Rating)]
        scores = outcome_scores(model, [e.tokens for e in rated])
        return attribute_error(scores, torch.tensor([e.ratings for e in rated], device=scores.device))


class JudgeSteps(Objective):
    """Cross-entropy at the end of each step."""

    def count(self, examples: Sequence[Example]) -> int:
        return sum(len(e.ends) for e in examples if isinstance(e, StepTargets))

    def loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        judged = [e for e in examples if isinstance(e, StepTargets)]
        logits = step_logits(model, [e.tokens for e in judged], [e.ends for e in judged])
        targets = torch.tensor([t for e in judged for t in e.targets], device=logits.device)
        return step_cross_entropy(logits, targets)


def outcome_scores(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
    """(N, labels) in float32, read at the last token of each sequence."""
    return _head(_rows_at_ends(model, sequences, [[len(tokens) - 1] for tokens in sequences]), model.score)


def step_logits(model: nn.Module, sequences: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> Tensor:
    """(steps of all sequences, 2) in float32."""
    return _head(_rows_at_ends(model, sequences, ends), model.score)


def _rows_at_ends(model: nn.Module, sequences: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> Tensor:
    """The hidden states at `ends` of each sequence. What sequences have in common at their beginning, the prompt of two
    answers for one, is computed once."""
    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
    tree = pack_tree([sequences[i] for i in order], _device(model), lone=False)
    rows = dict(zip(order, tree.rows, strict=True))
    at = np.concatenate([rows[i][list(of)] for i, of in enumerate(ends)])
    return rows_at(fused_rows(model, tree.packed), send(at, _device(model)))


def _head(rows: Tensor, head: nn.Module | Tensor) -> Tensor:
    """Scores decide what a policy becomes: their head is always float32."""
    assert isinstance(head, nn.Linear)
    bias = None if head.bias is None else head.bias.float()
    return nn.functional.linear(rows.float(), head.weight.float(), bias)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
