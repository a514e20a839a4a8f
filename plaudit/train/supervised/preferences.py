"""Learning from preferences: a policy's log-probs of whole responses, and the loss of a method on them.

The responses of a pair share their prompt, which is computed once; its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.preference.method import Answers, Judged
from plaudit.algo.tokens.logprobs import token_logprobs
from plaudit.algo.tokens.ragged import sample_sum
from plaudit.config import PreferenceAlgorithm
from plaudit.core.model.attention import rows_at
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.fused import fused_rows
from plaudit.core.model.packing import pack_tree, send
from plaudit.train.supervised.evaluate import auc
from plaudit.train.supervised.examples import Example, Labelled, Preferred
from plaudit.train.supervised.objectives import Objective

E = TypeVar("E", Preferred, Labelled)
Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a response to it."""


class LearnPreferences(Objective):
    """The mean loss of pairs, or of labelled responses."""

    def __init__(self, algorithm: PreferenceAlgorithm) -> None:
        self.settings, self.method = algorithm, algorithm.method
        self.baseline = 0.0
        self.imitated = 1.0
        self.rewards: list[tuple[Tensor, Tensor]] = []

    def count(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def begin(self, model: nn.Module, batch: Sequence[Sequence[Example]]) -> None:
        self.rewards = []
        if not self.method.pairs:
            self.baseline = _drift(model, [_of(micro, Labelled) for micro in batch])
        if self.method.imitates:
            pairs = [pair for micro in batch for pair in _of(micro, Preferred)]
            tokens = sum(len(p.chosen) + (len(p.prompt) - 1 if self.settings.prompt_loss else 0) for p in pairs)
            self.imitated = tokens / len(pairs)

    def loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        judged = self._pairs(model, examples) if self.method.pairs else self._labelled(model, examples)
        self._note(judged)
        return self.method.loss(judged, self.settings).sum()

    def _pairs(self, model: nn.Module, examples: Sequence[Example]) -> Judged:
        pairs = _of(examples, Preferred)
        sides = [(p.prompt, p.chosen) for p in pairs] + [(p.prompt, p.rejected) for p in pairs]
        whole = bool(self.method.imitates and self.settings.prompt_loss)
        prompts, responses = answer_logprobs(model, sides, prompts_of=len(pairs) if whole else 0)
        better, worse = responses[: len(pairs)], responses[len(pairs) :]
        nll = -(better + prompts[: len(pairs)]) / self.imitated if self.method.imitates else None
        return Judged(
            _answers(better, [p.chosen for p in pairs], [p.reference[0] for p in pairs]),
            _answers(worse, [p.rejected for p in pairs], [p.reference[1] for p in pairs]),
            nll=nll,
        )

    def _labelled(self, model: nn.Module, examples: Sequence[Example]) -> Judged:
        items = _of(examples, Labelled)
        _, logp = answer_logprobs(model, [(item.prompt, item.response) for item in items])
        answers = _answers(logp, [item.response for item in items], [item.reference[0] for item in items])
        desirable = torch.tensor([item.desirable for item in items], device=logp.device)
        return Judged(answers, desirable=desirable, baseline=self.baseline)

    def _note(self, judged: Judged) -> None:
        reward = self.method.reward(judged.better, self.settings).detach()
        if judged.worse is None:
            assert judged.desirable is not None
            self.rewards.append((reward[judged.desirable], reward[~judged.desirable]))
        else:
            self.rewards.append((reward, self.method.reward(judged.worse, self.settings).detach()))

    def figures(self) -> dict[str, float]:
        """By the reward that the policy stands for: how often, and by how much, the better response is ahead."""
        better, worse = (torch.cat(side).cpu().numpy() for side in zip(*self.rewards, strict=True))
        if self.method.pairs:
            ahead = float(np.mean((better > worse) + 0.5 * (better == worse)))
            return {"pair_accuracy": ahead, "lead": float((better - worse).mean())}
        figures = {"drift": self.baseline}
        if len(better) and len(worse):
            truth = np.repeat([True, False], [len(better), len(worse)])
            figures |= {"label_auc": auc(np.concatenate([better, worse]), truth)}
            figures |= {"lead": float(better.mean() - worse.mean())}
        return figures


def answer_logprobs(model: nn.Module, answers: Sequence[Answer], prompts_of: int = 0) -> tuple[Tensor, Tensor]:
    """(N,) each: log-probs of the prompts of the first `prompts_of` answers (their first token, which nothing predicts,
    left out; 0 for the others), and of all responses."""
    device = next(model.parameters()).device
    sequences = [prompt + response for prompt, response in answers]
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    tree = pack_tree([sequences[i] for i in order], device, lone=False)
    rows = dict(zip(order, tree.rows, strict=True))
    # The token at t is predicted by the row of the one before it.
    first = [1 if i < prompts_of else len(prompt) for i, (prompt, _) in enumerate(answers)]
    before = np.concatenate([rows[i][at - 1 : -1] for i, at in enumerate(first)])
    targets = np.fromiter(chain.from_iterable(sequences[i][at:] for i, at in enumerate(first)), np.int64)
    parts = [
        n for (prompt, response), at in zip(answers, first, strict=True) for n in (len(prompt) - at, len(response))
    ]
    decoder = Decoder(model, "causal")
    head = model.get_output_embeddings()  # type: ignore[operator]
    logp = token_logprobs(
        rows_at(fused_rows(model, tree.packed), send(before, device)), head.weight, send(targets, device), head.bias,
        finish=None if decoder.plain_logits else decoder.finish,
    )  # fmt: skip
    prompts, responses = sample_sum(logp, parts).view(-1, 2).unbind(1)
    return prompts, responses


@torch.no_grad()
def reference_logprobs(model: nn.Module, micros: Sequence[Sequence[Example]]) -> list[tuple[float, float]]:
    """Of both responses of each example."""
    logprobs: list[tuple[float, float]] = []
    for micro in micros:
        items = [e for e in micro if isinstance(e, Preferred | Labelled)]
        _, logp = answer_logprobs(model, [(item.prompt, response) for item in items for response in item.responses])
        logprobs += [(first, second) for first, second in logp.view(-1, 2).tolist()]
    return logprobs


@torch.no_grad()
def _drift(model: nn.Module, batch: Sequence[Sequence[Labelled]]) -> float:
    """KTO's estimate of KL(π || π_ref), from responses to other prompts."""
    total, count = 0.0, 0
    for items in batch:
        _, logp = answer_logprobs(model, [(item.prompt, item.other) for item in items])
        reference = torch.tensor([item.reference[1] for item in items], dtype=logp.dtype, device=logp.device)
        total += (logp - reference).sum().item()
        count += len(items)
    return max(0.0, total / count)


def _answers(logp: Tensor, responses: Sequence[Sequence[int]], reference: Sequence[float]) -> Answers:
    length, at_first = (
        torch.tensor(values, dtype=logp.dtype, device=logp.device)
        for values in ([len(r) for r in responses], reference)
    )
    return Answers(logp, length, at_first)


def _of(examples: Sequence[Example], kind: type[E]) -> list[E]:
    return [example for example in examples if isinstance(example, kind)]
