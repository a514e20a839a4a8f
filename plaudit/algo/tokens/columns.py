"""Log-probabilities of several tokens per row, in chunks of rows; `logprobs.py` does the same for one token.

The backward pass recomputes a chunk's logits, so memory does not grow with rows × vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plaudit.algo.tokens.logprobs import Finish, chunks
from plaudit.algo.tokens.vocabulary import SplitVocabulary


def column_logprobs(
    hidden: Tensor, head: Tensor, columns_RK: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    finish: Finish | None = None, split: SplitVocabulary | None = None,
) -> Tensor:  # fmt: skip
    """(R, K): log p of each row's tokens `columns_RK`, with a gradient. The rest is as in `logprobs.py`."""
    if split is not None:
        hidden = split.shared(hidden)

    def read(rows: Tensor, columns: Tensor) -> Tensor:
        logits = _logits(rows, head, bias, temperature, finish)
        if split is not None:
            return split.chosen(logits, columns) - split.normaliser(logits)
        return logits.log_softmax(-1).gather(-1, columns)

    parts = [
        checkpoint(read, hidden[part], columns_RK[part], use_reentrant=False)
        for part in chunks(len(hidden), head, split)
    ]
    return torch.cat(parts) if parts else torch.zeros(columns_RK.shape, device=hidden.device)  # no rows


@torch.no_grad()
def likeliest(
    hidden: Tensor, head: Tensor, count: int, among: int, bias: Tensor | None = None, temperature: float = 1.0,
    finish: Finish | None = None, split: SplitVocabulary | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(R, count) each: the likeliest of the first `among` tokens of the vocabulary, and their log-probs."""
    tokens = [torch.empty(0, count, dtype=torch.long, device=hidden.device)]  # there may be no rows
    values = [torch.empty(0, count, device=hidden.device)]
    for part in chunks(len(hidden), head, split):
        logits = _logits(hidden[part], head, bias, temperature, finish)
        if split is None:
            best, at = logits.log_softmax(-1)[:, :among].topk(count)
        else:
            at, best = split.likeliest(logits - split.normaliser(logits), count, among)
        tokens.append(at)
        values.append(best)
    return torch.cat(tokens), torch.cat(values)


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float, finish: Finish | None) -> Tensor:
    logits = F.linear(hidden, head, bias).to(torch.promote_types(head.dtype, torch.float32))
    if finish is not None:
        logits = finish(logits)
    return logits / temperature
