"""Log-probabilities of several tokens in each row, in chunks of rows, as `logprobs.py` has them of one.

The backward pass computes a chunk's logits again: memory does not grow with rows × vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plaudit.algo.tokens.logprobs import Finish, chunks


def column_logprobs(
    hidden: Tensor, head: Tensor, columns_RK: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    finish: Finish | None = None,
) -> Tensor:  # fmt: skip
    """(R, K): log p of each row's tokens `columns_RK`, with a gradient. The rest is as in `token_logprobs`."""

    def read(rows: Tensor, columns: Tensor) -> Tensor:
        return _log_softmax(rows, head, bias, temperature, finish).gather(-1, columns)

    parts = [
        checkpoint(read, hidden[part], columns_RK[part], use_reentrant=False) for part in chunks(len(hidden), head)
    ]
    return torch.cat(parts)


@torch.no_grad()
def likeliest(
    hidden: Tensor, head: Tensor, count: int, among: int, bias: Tensor | None = None, temperature: float = 1.0,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(R, count) each: the likeliest of the first `among` tokens of the vocabulary, and their log-probs."""
    top = [
        _log_softmax(hidden[part], head, bias, temperature, finish)[:, :among].topk(count)
        for part in chunks(len(hidden), head)
    ]
    return torch.cat([each.indices for each in top]), torch.cat([each.values for each in top])


def _log_softmax(
    hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float, finish: Finish | None
) -> Tensor:
    logits = F.linear(hidden, head, bias).to(torch.promote_types(head.dtype, torch.float32))
    if finish is not None:
        logits = finish(logits)
    return (logits / temperature).log_softmax(-1)
