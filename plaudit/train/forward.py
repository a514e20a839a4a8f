"""The learner's forward pass: log-probs, entropies and values of response tokens, packed, with or without gradients.

The token at t is predicted by the row at t - 1. Only the policy's own tokens are read; a tool's cost no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.algo.logprobs import token_logprobs_and_entropy
from plaudit.core.decoder import Decoder
from plaudit.core.packing import Packed, hidden_rows, pack
from plaudit.records import Sample


@dataclass(frozen=True)
class Responses:
    """Samples packed end to end, and where their response tokens lie."""

    packed: Packed
    tokens: Tensor
    """(T,) row of every response token."""
    own: Tensor
    """(K,) which of the T are the policy's."""
    ends: Tensor
    """(N,) row of each sample's last token."""


def pack_responses(samples: Sequence[Sample], device: torch.device) -> Responses:
    packed = pack([sample.prompt_ids + sample.token_ids for sample in samples], device)
    rows, ends = [], []
    for start, sample in zip(packed.starts, samples, strict=True):
        first = start + len(sample.prompt_ids)
        rows.append(np.arange(first, first + len(sample.token_ids)))
        ends.append(first + len(sample.token_ids) - 1)
    mask = np.fromiter((own for sample in samples for own in sample.mask), bool)
    return Responses(
        packed, torch.from_numpy(np.concatenate(rows)).to(device), torch.from_numpy(mask.nonzero()[0]).to(device),
        torch.tensor(ends, device=device),
    )  # fmt: skip


def logprobs_and_entropy(
    decoder: Decoder, responses: Responses, hidden: Tensor, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """(T,) each, 0 at tokens that are not the policy's."""
    rows = responses.tokens[responses.own]
    head = decoder.module.get_output_embeddings()  # type: ignore[operator]
    logp, entropy = token_logprobs_and_entropy(
        hidden[rows - 1], head.weight, responses.packed.input_ids[0, rows], head.bias, temperature=temperature,
        finish=None if decoder.plain_logits else decoder.finish, entropy_grad=entropy_grad,
    )  # fmt: skip
    zeros = torch.zeros(len(responses.tokens), device=logp.device)
    return zeros.index_put((responses.own,), logp), zeros.index_put((responses.own,), entropy)


def values_of(score: nn.Linear, responses: Responses, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The value before each response token (T,), and after each sample's last (N,), in float32."""
    rows = torch.cat([responses.tokens - 1, responses.ends])
    bias = None if score.bias is None else score.bias.float()
    values = nn.functional.linear(hidden[rows].float(), score.weight.float(), bias).squeeze(-1)
    return values[: len(responses.tokens)], values[len(responses.tokens) :]


def hidden_of(module: nn.Module, responses: Responses) -> Tensor:
    return hidden_rows(module, responses.packed)


def by_tokens(samples: Sequence[Sample], budget: int) -> list[list[int]]:
    """Indices of whole samples in order, as many together as the token budget holds; a larger one goes alone."""
    batches: list[list[int]] = []
    room = 0
    for index, sample in enumerate(samples):
        size = len(sample.prompt_ids) + len(sample.token_ids)
        if size > room or not batches:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= size
    return batches
