"""Packed attention on a GPU: one flash-attention call for sequences of any lengths.

Half precision and plain, windowed or grouped-query attention take that path. float32, soft caps and sinks, which the
kernel does not know, take the grouped path of the CPU, on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from plaudit.core.attention import Layout, Rule

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256

Span = tuple[int, int, int]  # first row, new tokens, tokens before


class VarlenLayout(Layout):
    """spans in row order; `rows[i]` says where each key of span i lies, in the row itself or in a cache."""

    def __init__(
        self,
        spans: Sequence[Span],
        rows: Sequence[np.ndarray],
        device: torch.device | str,
        grouped: Callable[[], Layout],
    ) -> None:
        super().__init__((), torch.empty(0))
        new = np.array([count for _, count, _ in spans])
        whole = new + np.array([before for _, _, before in spans])
        self.query_ends = _cumulative(new, device)
        self.key_ends = _cumulative(whole, device)
        self.longest_query, self.longest_key = int(new.max()), int(whole.max())
        self.key_rows = None
        if self.stored or (new != whole).any():
            self.key_rows = torch.from_numpy(np.concatenate(rows)).to(device, non_blocking=True)
        self._grouped = grouped
        self._made: Layout | None = None

    @property
    def stored(self) -> bool:
        """Whether keys lie in a cache."""
        return False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if not flash_knows(query, value, rule):
            return self._by_groups(layer, query, key, value, rule)
        keys, values = self.context(layer, key, value)
        if self.key_rows is not None:
            keys, values = keys.index_select(0, self.key_rows), values.index_select(0, self.key_rows)
        return flash(
            query, keys, values, self.query_ends, self.key_ends, self.longest_query, self.longest_key, rule
        )  # fmt: skip

    def _by_groups(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if self._made is None:
            self._made = self._grouped()
        return self._made.attend(layer, query, key, value, rule)


def flash_knows(query: Tensor, value: Tensor, rule: Rule) -> bool:
    dim = query.shape[-1]
    return (
        query.dtype in FLASH_DTYPES and rule.softcap is None and rule.sinks is None and not rule.dropout
        and dim <= FLASH_HEAD_DIM and dim % 8 == 0 and value.shape[-1] == dim
    )  # fmt: skip


def flash(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, longest_query: int,
    longest_key: int, rule: Rule,
) -> Tensor:  # fmt: skip
    """(Tq, H, D) over (Tk, K, D), causal from the right: the last query of a sequence sees its last key."""
    window = -1 if rule.window is None else rule.window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, query_ends, key_ends, longest_query, longest_key, 0.0, True, False, scale=rule.scale,
        window_size_left=window, window_size_right=0,
    )[0]  # fmt: skip
    return out


def _cumulative(counts: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)).to(device, non_blocking=True)
