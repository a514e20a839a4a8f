"""Training objectives: each computes a summed loss of examples, and the count to divide it by.

The learner divides by the count of the whole batch, so the gradient is the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.supervised_losses import attribute_error, bradley_terry, step_cross_entropy
from plaudit.config import BradleyTerry
from plaudit.core.model.attention import rows_at
from plaudit.core.model.packing import pack, pack_tree
from plaudit.train.run.ranks import Group
from plaudit.train.supervised.examples import Comparison, Demonstration, Example, Rating, StepTargets
from plaudit.train.supervised.reader import Places, Reader, target_logprobs


class Objective(Protocol):
    def count(self, examples: Sequence[Example]) -> int:
        """Return the denominator of the mean loss."""

    def pack(self, reader: Reader, examples: Sequence[Example]) -> Places:
        """Pack the model's input, with the positions to read."""

    def loss(self, model: nn.Module, examples: Sequence[Example], places: Places, hidden: Tensor) -> Tensor:
        """Return the summed loss from the final hidden states of the packed input."""

    def begin(self, reader: Reader, batch: Sequence[Example]) -> None:
        """Prepare a whole batch, if the loss of an example depends on others."""
        return

    def note(self) -> None:
        """Record the metrics of the last loss."""
        return

    def figures(self, group: Group) -> dict[str, float]:
        """Return the metrics since `begin`, besides the loss, over all ranks of the group."""
        return {}


class Imitate(Objective):
    """SFT: the mean negative log-probability of response tokens."""

    def count(self, examples: Sequence[Example]) -> int:
        return sum(len(e.tokens) - e.answer_at for e in examples if isinstance(e, Demonstration))

    def pack(self, reader: Reader, examples: Sequence[Example]) -> Places:
        demonstrations = [e for e in examples if isinstance(e, Demonstration)]
        packed = pack([e.tokens for e in demonstrations], reader.device, lone=False)
        # The token at t is predicted by the row at t - 1.
        spans = [
            np.arange(start + e.answer_at - 1, start + len(e.tokens) - 1)
            for start, e in zip(packed.starts, demonstrations, strict=True)
        ]
        return reader.places(packed, np.concatenate(spans))

    def loss(self, model: nn.Module, examples: Sequence[Example], places: Places, hidden: Tensor) -> Tensor:
        tokens = [t for e in examples if isinstance(e, Demonstration) for t in e.tokens[e.answer_at :]]
        targets = places.own(torch.tensor(tokens, device=hidden.device))
        return -places.whole(target_logprobs(model, hidden[places.at], targets)).sum()


class Prefer(Objective):
    """Bradley–Terry on pairs."""

    def __init__(self, algorithm: BradleyTerry) -> None:
        self.algorithm = algorithm

    def count(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def pack(self, reader: Reader, examples: Sequence[Example]) -> Places:
        return pack_pairs(reader, [e for e in examples if isinstance(e, Comparison)])

    def loss(self, model: nn.Module, examples: Sequence[Example], places: Places, hidden: Tensor) -> Tensor:
        pairs = [e for e in examples if isinstance(e, Comparison)]
        scores = head_scores(model, places, hidden)[:, 0]
        margin = torch.tensor([e.margin for e in pairs], device=scores.device) if self.algorithm.use_margins else None
        return bradley_terry(scores[: len(pairs)], scores[len(pairs) :], margin, self.algorithm.centring)


class Rate(Objective):
    """Squared error against ratings, one per attribute."""

    def count(self, examples: Sequence[Example]) -> int:
        return sum(r == r for e in examples if isinstance(e, Rating) for r in e.ratings)

    def pack(self, reader: Reader, examples: Sequence[Example]) -> Places:
        return pack_rated(reader, [e for e in examples if isinstance(e, Rating)])

    def loss(self, model: nn.Module, examples: Sequence[Example], places: Places, hidden: Tensor) -> Tensor:
        rated = [e for e in examples if isinstance(e, Rating)]
        scores = head_scores(model, places, hidden)
        return attribute_error(scores, torch.tensor([e.ratings for e in rated], device=scores.device))


class JudgeSteps(Objective):
    """Cross-entropy at the end of each step."""

    def count(self, examples: Sequence[Example]) -> int:
        return sum(len(e.ends) for e in examples if isinstance(e, StepTargets))

    def pack(self, reader: Reader, examples: Sequence[Example]) -> Places:
        return pack_steps(reader, [e for e in examples if isinstance(e, StepTargets)])

    def loss(self, model: nn.Module, examples: Sequence[Example], places: Places, hidden: Tensor) -> Tensor:
        judged = [e for e in examples if isinstance(e, StepTargets)]
        logits = head_scores(model, places, hidden)
        targets = torch.tensor([t for e in judged for t in e.targets], device=logits.device)
        return step_cross_entropy(logits, targets)


def pack_pairs(reader: Reader, pairs: Sequence[Comparison]) -> Places:
    """Read at the last token of each sequence: all chosen ones, then all rejected ones."""
    return _at_ends(reader, [e.chosen for e in pairs] + [e.rejected for e in pairs])


def pack_rated(reader: Reader, rated: Sequence[Rating]) -> Places:
    return _at_ends(reader, [e.tokens for e in rated])


def pack_steps(reader: Reader, judged: Sequence[StepTargets]) -> Places:
    return _at(reader, [e.tokens for e in judged], [e.ends for e in judged])


def _at_ends(reader: Reader, sequences: Sequence[Sequence[int]]) -> Places:
    return _at(reader, sequences, [[len(tokens) - 1] for tokens in sequences])


def _at(reader: Reader, sequences: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> Places:
    """At `ends` of each sequence. What sequences have in common at their beginning, the prompt of two answers for one,
    is computed once."""
    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
    tree = pack_tree([sequences[i] for i in order], reader.device, lone=False)
    rows = dict(zip(order, tree.rows, strict=True))
    return reader.places(tree.packed, np.concatenate([rows[i][list(of)] for i, of in enumerate(ends)]))


def head_scores(model: nn.Module, places: Places, hidden: Tensor) -> Tensor:
    """Return scores (places, labels). The head is always float32."""
    head = model.score
    assert isinstance(head, nn.Linear)
    bias = None if head.bias is None else head.bias.float()
    rows = rows_at(hidden, places.at).float()
    return places.whole(nn.functional.linear(rows, head.weight.float(), bias))
