"""Reductions over concatenated samples.

T tokens of N samples without padding: sample i is the next lengths[i] tokens, sum(lengths) = T. A mask (T,) is true at
the policy's own tokens and false at those of tools and observations. G groups: samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, np, torch


def repeat(per_sample_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """(N,) to (T,): each sample's number at each of its tokens."""
    counts_N = torch.tensor(lengths, dtype=torch.long, device=per_sample_N.device)
    return torch.repeat_interleave(per_sample_N, counts_N, output_size=sum(lengths))


def spread(per_sample_N: Tensor, mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """(N,) to (T,): each sample's number at its policy tokens, 0 at masked ones."""
    return torch.where(mask_T, repeat(per_sample_N, lengths), 0.0)


def sample_sum(values_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """(T,) to (N,): the sum over each sample's tokens, 0 for a sample without tokens."""
    owner_T = repeat(torch.arange(len(lengths), device=values_T.device), lengths)
    return torch.zeros(len(lengths), dtype=values_T.dtype, device=values_T.device).index_add(0, owner_T, values_T)


def policy_tokens(mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """(N,): the number of policy tokens of each sample."""
    return sample_sum(mask_T.long(), lengths)


def sample_mean(values_T: Tensor, mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """(N,): the mean over each sample's policy tokens, 0 where it has none."""
    sums_N = sample_sum(torch.where(mask_T, values_T, 0.0), lengths)
    return sums_N / policy_tokens(mask_T, lengths).clamp(min=1)


def discounted(values_T: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """(T,): out[t] = values[t] + factor · out[t + 1] within each sample. Has no gradient."""
    size, longest = np.asarray(lengths, dtype=np.int64), max(lengths, default=0)
    at = np.arange(longest)[:, None] < size[None, :]  # (longest, N), time first
    table = np.zeros(at.shape)
    table.T[at.T] = values_T.detach().cpu().double().numpy()
    for t in range(longest - 2, -1, -1):
        table[t] += factor * table[t + 1]
    return torch.from_numpy(table.T[at.T]).to(values_T)


def group_index(groups: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The number (N,) of each sample's group, counted from 0, and the size (G,) of each group."""
    _, index_N, sizes_G = torch.unique(torch.tensor(groups, device=device), return_inverse=True, return_counts=True)
    return index_N, sizes_G
