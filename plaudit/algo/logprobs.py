"""Log-probabilities of given tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32."""


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """log p(target) of each row, (N,), in float32.

    hidden   (N, hidden) rows before the vocabulary head
    head     (V, hidden) weight of the head
    targets  (N,) token ids

    Rows are taken in chunks and each chunk's logits are computed again in the backward pass, so that memory does not
    grow with rows × vocabulary.
    """
    rows = max(1, LOGIT_ELEMENTS // head.shape[0])
    if hidden.shape[0] <= rows:
        return _chunk(hidden, head, targets, bias)
    chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    return torch.cat([checkpoint(_chunk, h, head, t, bias, use_reentrant=False) for h, t in chunks])


def _chunk(hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, head, bias).float()
    return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)
