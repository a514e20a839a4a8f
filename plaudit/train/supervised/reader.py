"""A rank's forward passes over examples: its share of them, its slice of each packed row, its stage of the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.tokens.logprobs import token_logprobs
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import Packed, send
from plaudit.train.optim.context import placed, sliced
from plaudit.train.optim.pipeline import stage_of
from plaudit.train.optim.sharding import free_gathered, head_of, packed_rows
from plaudit.train.policy.forward import MicroBatch, shared_batches
from plaudit.train.run.ranks import ALONE, Group, Ranks
from plaudit.train.supervised.examples import Example, token_count

Item = TypeVar("Item", bound=Example)


@dataclass(frozen=True)
class Places:
    """Sequences in one packed row, and the positions read from it. If ranks split the row, `packed` is this rank's
    slice, `at` counts from its first token, and `here` are the indices of these among all `count` positions."""

    packed: Packed
    at: Tensor
    here: Tensor
    count: int
    context: Group

    def own(self, values: Tensor) -> Tensor:
        """Of values for all positions, those of the positions read on this rank."""
        return values if self.context.size == 1 else values[self.here]

    def whole(self, values: Tensor) -> Tensor:
        """The values of all positions, (count, ...), from those that each rank has read. Collective."""
        return values if self.context.size == 1 else placed(self.here, values, self.count, self.context)


class Reader:
    def __init__(self, model: nn.Module, micro_batch_tokens: int, ranks: Ranks = ALONE) -> None:
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self.group, self.context = ranks.data, ranks.context
        self.stage = stage_of(model)
        self.device = next(model.parameters()).device

    @property
    def results(self) -> Group:
        """The ranks that exchange the results after a pass."""
        return self.stage.results(self.group)

    def batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return shared_batches([token_count(e) for e in examples], self.micro_batch_tokens, self.group)

    def places(self, packed: Packed, at: np.ndarray) -> Places:
        """Of positions in the whole row, those that this rank reads."""
        share = self.context.share(packed.input_ids.shape[1])
        own = at - share.start
        here = ((own >= 0) & (own < len(share))).nonzero()[0]
        sent = send(own[here], self.device), send(here, self.device)
        return Places(sliced(packed, self.context), *sent, len(at), self.context)

    def rows(self, places: Places) -> Tensor:
        """Final hidden states. Earlier stages return those of their last layer, and send them to the next stage."""
        rows = packed_rows(self.model, places.packed)
        self.stage.pass_on(rows)
        return rows

    @torch.no_grad()
    def read(
        self, examples: Sequence[Item], pack: Callable[[Sequence[Item]], Places],
        values: Callable[[Sequence[Item], Places, Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """The results of `values` on the final hidden states, for all examples, in order, flat, on the CPU of every
        rank."""
        parts = []
        for batch in self.batches(examples):
            items = [examples[i] for i in batch.indices]
            places = pack(items)
            hidden = self.rows(places)
            if self.stage.last:
                part = values(items, places, hidden)
                if batch.counts:
                    parts.append(part.flatten().cpu())
        free_gathered(self.model)
        return self.results.concatenate(parts)


def target_logprobs(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    """The log-probs of the tokens that follow each row, after the model's transformation of its logits (soft caps,
    scales)."""
    decoder, head = Decoder(model, "causal"), head_of(model)
    finish = None if decoder.plain_logits else decoder.finish
    return token_logprobs(rows, head.weight, targets, head.bias, finish=finish, split=head.split)
