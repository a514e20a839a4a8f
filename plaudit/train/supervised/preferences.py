"""Preference training: log-probs of whole responses under the policy, and a method's loss on them.

The responses of a pair share their prompt, which is computed once; its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.preference.method import PreferenceBatch, Responses
from plaudit.algo.tokens.ragged import sample_sum
from plaudit.config import PreferenceAlgorithm
from plaudit.core.model.attention import rows_at
from plaudit.core.model.packing import pack_tree, send
from plaudit.train.run.ranks import Group
from plaudit.train.supervised.evaluate import auc
from plaudit.train.supervised.examples import Example, Labelled, Preferred
from plaudit.train.supervised.objectives import Objective
from plaudit.train.supervised.reader import Places, Reader, target_logprobs

E = TypeVar("E", Preferred, Labelled)
Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a response to it."""


class LearnPreferences(Objective):
    """The mean loss of pairs, or of labelled responses."""

    def __init__(self, algorithm: PreferenceAlgorithm) -> None:
        self.settings, self.method = algorithm, algorithm.method
        self.baseline = 0.0
        self.sft_tokens = 1.0
        self.rewards: list[tuple[Tensor, Tensor]] = []
        self.last: tuple[Tensor, Tensor]

    def count(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def begin(self, reader: Reader, batch: Sequence[Example]) -> None:
        self.rewards = []
        if not self.method.pairs:
            self.baseline = _drift(reader, _of(batch, Labelled))
        if self.method.has_sft_term:
            pairs = _of(batch, Preferred)
            tokens = sum(len(p.chosen) + (len(p.prompt) - 1 if self.settings.prompt_loss else 0) for p in pairs)
            self.sft_tokens = tokens / len(pairs)

    def pack(self, reader: Reader, examples: Sequence[Example]) -> Places:
        return pack_answers(reader, *self._answers(examples))

    def loss(self, model: nn.Module, examples: Sequence[Example], places: Places, hidden: Tensor) -> Tensor:
        answers, prompts_of = self._answers(examples)
        prompts, responses = answer_logprobs(model, answers, places, hidden, prompts_of)
        batch = self._pairs(examples, prompts, responses) if self.method.pairs else self._labelled(examples, responses)
        self.last = self._rewards(batch)
        return self.method.loss(batch, self.settings).sum()

    def _answers(self, examples: Sequence[Example]) -> tuple[list[Answer], int]:
        """Return the responses to score, and for how many of the first ones the prompt is scored too."""
        if not self.method.pairs:
            return [(item.prompt, item.response) for item in _of(examples, Labelled)], 0
        pairs = _of(examples, Preferred)
        sides = [(p.prompt, p.chosen) for p in pairs] + [(p.prompt, p.rejected) for p in pairs]
        whole = bool(self.method.has_sft_term and self.settings.prompt_loss)
        return sides, len(pairs) if whole else 0

    def _pairs(self, examples: Sequence[Example], prompts: Tensor, responses: Tensor) -> PreferenceBatch:
        pairs = _of(examples, Preferred)
        better, worse = responses[: len(pairs)], responses[len(pairs) :]
        nll = -(better + prompts[: len(pairs)]) / self.sft_tokens if self.method.has_sft_term else None
        return PreferenceBatch(
            _answers(better, [p.chosen for p in pairs], [p.reference[0] for p in pairs]),
            _answers(worse, [p.rejected for p in pairs], [p.reference[1] for p in pairs]),
            nll=nll,
        )

    def _labelled(self, examples: Sequence[Example], logp: Tensor) -> PreferenceBatch:
        items = _of(examples, Labelled)
        answers = _answers(logp, [item.response for item in items], [item.reference[0] for item in items])
        desirable = torch.tensor([item.desirable for item in items], device=logp.device)
        return PreferenceBatch(answers, desirable=desirable, baseline=self.baseline)

    def _rewards(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        reward = self.method.reward(batch.better, self.settings).detach()
        if batch.worse is None:
            assert batch.desirable is not None
            return reward[batch.desirable], reward[~batch.desirable]
        return reward, self.method.reward(batch.worse, self.settings).detach()

    def note(self) -> None:
        self.rewards.append(self.last)

    def figures(self, group: Group) -> dict[str, float]:
        """Return metrics of the implicit reward: pair accuracy and margin."""
        better, worse = (group.concatenate([each[side] for each in self.rewards]).numpy() for side in (0, 1))
        if self.method.pairs:
            ahead = float(np.mean((better > worse) + 0.5 * (better == worse)))
            return {"pair_accuracy": ahead, "lead": float((better - worse).mean())}
        figures = {"drift": self.baseline}
        if len(better) and len(worse):
            truth = np.repeat([True, False], [len(better), len(worse)])
            figures |= {"label_auc": auc(np.concatenate([better, worse]), truth)}
            figures |= {"lead": float(better.mean() - worse.mean())}
        return figures


def pack_answers(reader: Reader, answers: Sequence[Answer], prompts_of: int = 0) -> Places:
    """Read at the tokens before those of all responses, and of the prompts of the first `prompts_of` of them."""
    sequences = [prompt + response for prompt, response in answers]
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    tree = pack_tree([sequences[i] for i in order], reader.device, lone=False)
    rows = dict(zip(order, tree.rows, strict=True))
    # The token at t is predicted by the row of the one before it.
    first = _first_read(answers, prompts_of)
    return reader.places(tree.packed, np.concatenate([rows[i][at - 1 : -1] for i, at in enumerate(first)]))


def answer_logprobs(
    model: nn.Module, answers: Sequence[Answer], places: Places, hidden: Tensor, prompts_of: int = 0
) -> tuple[Tensor, Tensor]:
    """(N,) each: log-probs of the prompts of the first `prompts_of` answers (their first token, which nothing predicts,
    left out; 0 for the others), and of all responses."""
    first = _first_read(answers, prompts_of)
    tokens = chain.from_iterable(
        (*prompt, *response)[at:] for (prompt, response), at in zip(answers, first, strict=True)
    )
    targets = places.own(send(np.fromiter(tokens, np.int64), hidden.device))
    parts = [
        n for (prompt, response), at in zip(answers, first, strict=True) for n in (len(prompt) - at, len(response))
    ]
    logp = target_logprobs(model, rows_at(hidden, places.at), targets)
    prompts, responses = sample_sum(places.whole(logp), parts).view(-1, 2).unbind(1)
    return prompts, responses


def _first_read(answers: Sequence[Answer], prompts_of: int) -> list[int]:
    """The place of the first token of each answer whose log-prob is read."""
    return [1 if i < prompts_of else len(prompt) for i, (prompt, _) in enumerate(answers)]


def reference_logprobs(reader: Reader, items: Sequence[Preferred | Labelled]) -> list[tuple[float, float]]:
    """Of both responses of each example."""

    def both(items: Sequence[Preferred | Labelled]) -> list[Answer]:
        return [(item.prompt, response) for item in items for response in item.responses]

    logp = reader.read(
        items, lambda part: pack_answers(reader, both(part)),
        lambda part, places, hidden: answer_logprobs(reader.model, both(part), places, hidden)[1],
    )  # fmt: skip
    return [(first, second) for first, second in logp.view(-1, 2).tolist()]


def _drift(reader: Reader, items: Sequence[Labelled]) -> float:
    """KTO's estimate of KL(π || π_ref), from responses to other prompts."""

    def others(items: Sequence[Labelled]) -> list[Answer]:
        return [(item.prompt, item.other) for item in items]

    logp = reader.read(
        items, lambda part: pack_answers(reader, others(part)),
        lambda part, places, hidden: answer_logprobs(reader.model, others(part), places, hidden)[1],
    )  # fmt: skip
    reference = torch.tensor([item.reference[1] for item in items], dtype=torch.float64)
    return max(0.0, (logp.double() - reference).mean().item())


def _answers(logp: Tensor, responses: Sequence[Sequence[int]], reference: Sequence[float]) -> Responses:
    length, at_first = (
        torch.tensor(values, dtype=logp.dtype, device=logp.device)
        for values in ([len(r) for r in responses], reference)
    )
    return Responses(logp, length, at_first)


def _of(examples: Sequence[Example], kind: type[E]) -> list[E]:
    return [example for example in examples if isinstance(example, kind)]
