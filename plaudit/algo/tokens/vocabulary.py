"""A vocabulary split over ranks: each has some rows of the embedding and of the head, and so some of the logits.

A log-prob needs a few values from the logits of its row: the maximum, the sum of exponentials, the token's logit. These
are exchanged, in float32, and no rank ever has the logits of the whole vocabulary. Hidden states, log-probs and what is
computed from them are whole, and equal, on every rank; so are their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


@dataclass(frozen=True)
class SplitVocabulary:
    """A rank's tokens, `start` to `end` - 1; `mesh` are the ranks that split the vocabulary."""

    start: int
    end: int
    largest_part: int
    """Tokens of the rank that has the most: sets the size of row chunks on all ranks, which exchange by chunk."""
    mesh: DeviceMesh

    def look_up(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """(..., hidden) of tokens (...), from this rank's rows of an embedding."""
        here, own = self._here(tokens)
        return self._summed(F.embedding(here, embedding).masked_fill(~own[..., None], 0))

    def shared(self, hidden: Tensor) -> Tensor:
        """Rows that every rank multiplies with its part of the head: their gradient is summed over the ranks."""
        rows = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return rows.to_local(grad_placements=[Partial()])

    def normaliser(self, logits: Tensor) -> Tensor:
        """(R, 1): log Σ e^z over the whole vocabulary, from this rank's logits (R, end - start)."""
        peak = logits.detach().amax(-1, keepdim=True)
        dist.all_reduce(peak, dist.ReduceOp.MAX, self.mesh.get_group())
        return peak + self._summed((logits - peak).exp().sum(-1, keepdim=True)).log()

    def chosen(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """(R, K): the logits of tokens (R, K), from the ranks that have them."""
        here, own = self._here(tokens)
        return self._summed(logits.gather(-1, here).masked_fill(~own, 0))

    def entropy(self, log_p: Tensor) -> Tensor:
        """(R,), from this rank's log-probs (R, end - start)."""
        return -self._summed((log_p.exp() * log_p).sum(-1))

    def likeliest(self, log_p: Tensor, count: int, among: int) -> tuple[Tensor, Tensor]:
        """(R, count) each: the likeliest of the first `among` tokens and their log-probs, from this rank's (R, end -
        start). Without a gradient."""
        log_p = log_p[:, : max(0, among - self.start)]
        best, at = log_p.topk(min(count, log_p.shape[1]))
        missing = (0, count - best.shape[1])
        candidates = F.pad(best, missing, value=-torch.inf), F.pad(at + self.start, missing)
        values, tokens = (torch.cat(self._gathered(each), -1) for each in candidates)
        best, at = values.topk(count)
        return tokens.gather(-1, at), best

    def onto(self, gradient: Tensor, tokens: Tensor, values: Tensor) -> None:
        """Add values (R,) to this rank's gradient (R, end - start) of logits at the tokens (R,) that it has."""
        here, own = self._here(tokens)
        gradient.scatter_add_(1, here[:, None], (values * own)[:, None])

    def _here(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of tokens among this rank's, and whether it has them."""
        return (tokens - self.start).clamp(0, self.end - self.start - 1), (tokens >= self.start) & (tokens < self.end)

    def _summed(self, part: Tensor) -> Tensor:
        """The sum over the ranks. All of them compute the same from it, so the gradient needs no exchange."""
        parts = DTensor.from_local(part, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()

    def _gathered(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.mesh.size())]
        dist.all_gather(parts, part.contiguous(), self.mesh.get_group())
        return parts
