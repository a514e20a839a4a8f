"""The learner's forward pass: log-probs, entropies and values of response tokens, packed, with or without gradients.

The token at t is predicted by the row of the token before it. The head is applied only for the policy's own tokens, not
for those of tools. Samples share the rows of a common prefix, such as their prompt: it is computed once, and its
gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.tokens.columns import column_logprobs, likeliest
from plaudit.algo.tokens.logprobs import token_logprobs_and_entropy
from plaudit.core.model.attention import rows_at
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import Packed, pack_tree, send, use_packed_attention
from plaudit.core.routing import Replay, Routing
from plaudit.errors import DataError
from plaudit.records import Sample
from plaudit.train.optim.context import placed, sliced
from plaudit.train.optim.pipeline import stage_of
from plaudit.train.optim.sharding import free_gathered, head_of, packed_rows
from plaudit.train.run.ranks import ONE, Group


@dataclass(frozen=True)
class Responses:
    """Samples packed into one row, and the positions of their response tokens. If ranks split the row, `packed` is this
    rank's slice, rows are counted from its first, and those outside of it are not read on this rank."""

    packed: Packed
    before: Tensor
    """(T,) row of the token before each response token, which predicts it."""
    targets: Tensor
    """(T,) the response tokens."""
    own: Tensor
    """(K,) which of the T are the policy's own and predicted on this rank."""
    ends: Tensor
    """(N,) row of each sample's last token."""
    valued: Tensor
    """(V,) which of the rows `before` and `ends` are on this rank."""
    context: Group = ONE
    """The ranks that split the row."""
    replay: Replay | None = None
    """For a mixture of experts: the experts that the engine chose."""

    def whole(self, at: Tensor, values: Tensor, count: int) -> Tensor:
        """(count, ...): the values of all ranks at their positions `at`, and 0 elsewhere."""
        return placed(at, values, count, self.context)


def pack_responses(
    samples: Sequence[Sample], device: torch.device, routing: Routing | None = None, context: Group = ONE
) -> Responses:
    sequences = [sample.prompt_ids + sample.token_ids for sample in samples]
    experts = None if routing is None else [_experts(sample, routing) for sample in samples]
    keys: Sequence[Any] = sequences
    if experts is not None:  # a row is shared only if the engine chose the same experts for it
        keys = [
            [*zip_longest(ids, map(bytes, chosen), fillvalue=b"")]
            for ids, chosen in zip(sequences, experts, strict=True)
        ]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    tree = pack_tree([sequences[i] for i in order], device, lone=False, keys=[keys[i] for i in order])
    rows = dict(zip(order, tree.rows, strict=True))
    before = [rows[i][len(sample.prompt_ids) - 1 : -1] for i, sample in enumerate(samples)]
    targets = np.fromiter(chain.from_iterable(sample.token_ids for sample in samples), np.int64)
    mask = np.fromiter(chain.from_iterable(sample.mask for sample in samples), bool)
    ends = np.array([rows[i][-1] for i in range(len(samples))])
    share = context.share(tree.tokens)
    read = np.concatenate([*before, ends]) - share.start
    here = (read >= 0) & (read < len(share))
    count = len(targets)
    places = (read[:count], targets, (mask & here[:count]).nonzero()[0], read[count:], here.nonzero()[0])
    before_rows, target_ids, own, last_rows, valued = (send(place, device) for place in places)
    row = sliced(tree.packed, context)
    packed = Responses(row, before_rows, target_ids, own, last_rows, valued, context)
    if routing is None or experts is None:
        return packed
    chosen, recorded = np.zeros((tree.tokens, *routing.shape), routing.dtype), np.zeros(tree.tokens, bool)
    for i, record in enumerate(experts):
        at = rows[i][: len(record)]
        chosen[at], recorded[at] = record, True
    return replace(packed, replay=Replay(send(chosen, device), send(recorded, device)))


def _experts(sample: Sample, routing: Routing) -> np.ndarray:
    if sample.experts is None:
        raise DataError(
            "train.routing_replay is on, and a sample has no experts: generate samples with it on, or remove it"
        )
    return routing.rows(sample.experts, len(sample.prompt_ids) + len(sample.token_ids))


def replaying(routing: Routing | None, responses: Responses) -> AbstractContextManager[None]:
    """A context in which forward passes, and those recomputed by a backward pass, use the engine's experts."""
    return nullcontext() if routing is None else routing.by(responses.replay)


def logprobs_and_entropy(
    decoder: Decoder, responses: Responses, hidden: Tensor, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """(T,) each; 0 at tokens that are not the policy's own."""
    own, head = responses.own, head_of(decoder.module)
    logp, entropy = token_logprobs_and_entropy(
        rows_at(hidden, responses.before[own]), head.weight, responses.targets[own], head.bias, temperature=temperature,
        finish=None if decoder.plain_logits else decoder.finish, entropy_grad=entropy_grad, split=head.split,
    )  # fmt: skip
    count = len(responses.targets)
    return responses.whole(own, logp, count), responses.whole(own, entropy, count)


def column_logprobs_of(
    decoder: Decoder, responses: Responses, hidden: Tensor, temperature: float, columns: Tensor
) -> Tensor:
    """(T, K): the log-probs of the tokens `columns` (T, K) at the position of each response token, 0 where that is not
    the policy's own."""
    own, head = responses.own, head_of(decoder.module)
    logp = column_logprobs(
        rows_at(hidden, responses.before[own]), head.weight, columns[own], head.bias, temperature,
        None if decoder.plain_logits else decoder.finish, head.split,
    )  # fmt: skip
    return responses.whole(own, logp, len(columns))


def likeliest_of(
    decoder: Decoder, responses: Responses, hidden: Tensor, temperature: float, count: int, among: int
) -> tuple[Tensor, Tensor]:
    """(T, count) each: the likeliest tokens at the position of each response token, of the first `among` of the
    vocabulary, and their log-probs; 0 where that is not the policy's own."""
    own, head = responses.own, head_of(decoder.module)
    tokens, logp = likeliest(
        rows_at(hidden, responses.before[own]), head.weight, count, among, head.bias, temperature,
        None if decoder.plain_logits else decoder.finish, head.split,
    )  # fmt: skip
    length = len(responses.targets)
    return responses.whole(own, tokens, length), responses.whole(own, logp, length)


def values_of(score: nn.Linear, responses: Responses, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The value before each response token (T,), and after each sample's last (N,), in float32."""
    rows = torch.cat([responses.before, responses.ends])
    bias = None if score.bias is None else score.bias.float()
    read = rows_at(hidden, rows[responses.valued]).float()
    values = nn.functional.linear(read, score.weight.float(), bias).squeeze(-1)
    values = responses.whole(responses.valued, values, len(rows))
    return values[: len(responses.targets)], values[len(responses.targets) :]


@torch.no_grad()
def read_values(
    module: nn.Module, score: nn.Linear, samples: Sequence[Sample], micro_batch_tokens: int, group: Group,
    routing: Routing | None = None, context: Group = ONE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """On the CPU: the values before each response token (T,), and after each sample's last (N,)."""
    use_packed_attention(module)
    device, stage = next(module.parameters()).device, stage_of(module)
    before, after = [], []
    for batch in micro_batches(samples, micro_batch_tokens, group):
        responses = pack_responses([samples[i] for i in batch.indices], device, routing, context)
        with replaying(routing, responses):
            hidden = hidden_of(module, responses)
        if not stage.last:
            continue
        at, end = values_of(score, responses, hidden)
        if batch.counts:
            before.append(at.cpu())
            after.append(end.cpu())
    free_gathered(module)
    readers = stage.results(group)
    return readers.concatenate(before), readers.concatenate(after)


def hidden_of(module: nn.Module, responses: Responses) -> Tensor:
    """Final hidden states. Earlier stages return those of their last layer, and send them to the next stage."""
    rows = packed_rows(module, responses.packed)
    stage_of(module).pass_on(rows)
    return rows


@dataclass(frozen=True)
class MicroBatch:
    indices: list[int]
    """Consecutive samples."""
    counts: bool = True
    """False: computed only because the other ranks compute too."""


def micro_batches(samples: Sequence[Sample], budget: int, group: Group, together: int = 1) -> list[MicroBatch]:
    """This rank's share of the samples, in micro-batches. Each `together` consecutive samples stay together."""
    return shared_batches([len(s.prompt_ids) + len(s.token_ids) for s in samples], budget, group, together)


def shared_batches(tokens: Sequence[int], budget: int, group: Group, together: int = 1) -> list[MicroBatch]:
    """This rank's share of samples with these numbers of tokens, in batches within the token budget. Every rank has the
    same number of batches, since gathering sharded weights is collective: a rank with fewer computes the shortest
    sample again, which does not count."""
    sizes = np.array(tokens).reshape(-1, together).sum(1)
    members = np.arange(len(tokens)).reshape(-1, together)
    ends = np.cumsum(sizes)
    # Split into equal numbers of tokens: a rank's time is proportional to its tokens.
    cuts = np.searchsorted(ends, [ends[-1] * part / group.size for part in range(1, group.size)], side="right")
    shares = []
    for share in np.split(np.arange(len(sizes)), cuts):
        batches = by_tokens(sizes[share].tolist(), budget)
        shares.append([members[share[batch]].ravel().tolist() for batch in batches])
    mine, most = shares[group.index], max(map(len, shares))
    shortest = members[np.argmin(sizes)].tolist()
    return [MicroBatch(batch) for batch in mine] + [MicroBatch(shortest, counts=False)] * (most - len(mine))


def by_tokens(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Their indices in order, as many in a batch as fit in the token budget; a larger one is a batch of its own."""
    batches: list[list[int]] = []
    left = 0
    for index, size in enumerate(sizes):
        if size > left or not batches:
            batches.append([])
            left = budget
        batches[-1].append(index)
        left -= size
    return batches
