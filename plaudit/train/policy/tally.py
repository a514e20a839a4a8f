"""Aggregates the metrics of micro-batches as if the batch were one. Values stay on their device until they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plaudit.algo.correction import mismatch
from plaudit.train.run.ranks import Group


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._means: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._lowest: dict[str, list[Tensor]] = {}
        self._highest: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add to a sum."""
        self._sums.setdefault(name, []).append(value.detach())

    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add to a mean over the tokens of the mask."""
        self._means.setdefault(name, []).append((torch.where(mask, values, 0.0).sum(), mask.sum()))

    def weighted(self, name: str, value: float, weight: float) -> None:
        self._means.setdefault(name, []).append((torch.tensor(value * weight), torch.tensor(weight)))

    def smallest(self, name: str, values: Tensor, mask: Tensor) -> None:
        self._lowest.setdefault(name, []).append(torch.where(mask, values, torch.inf).min())

    def largest(self, name: str, values: Tensor, mask: Tensor) -> None:
        self._highest.setdefault(name, []).append(torch.where(mask, values, -torch.inf).max())

    def mismatch(self, learners: Tensor, behaviour: Tensor, mask: Tensor) -> None:
        """Add the difference between the learner's and the engine's log-probs."""
        for name, value in mismatch(learners, behaviour, mask).items():
            if name == "abs_max":
                self.largest(f"mismatch/{name}", torch.full_like(learners, value), mask)
            else:
                self.weighted(f"mismatch/{name}", value, int(mask.sum()))

    def sum(self, name: str) -> float:
        return sum(part.item() for part in self._sums.get(name, ()))

    def merge(self, other: Tally) -> None:
        """Merge the metrics of another update of the same step."""
        for mine, theirs in (
            (self._sums, other._sums), (self._means, other._means), (self._lowest, other._lowest),
            (self._highest, other._highest),
        ):  # fmt: skip
            for name, parts in theirs.items():
                mine.setdefault(name, []).extend(parts)  # type: ignore[arg-type]

    def gathered(self, group: Group) -> Tally:
        """Return the metrics of all ranks of a group, the same on each."""
        if group.size == 1:
            return self
        fields = ("_sums", "_means", "_lowest", "_highest")
        together = Tally()
        for seen in group.gather_values([_plain(getattr(self, name)) for name in fields]):
            for name, parts in zip(fields, seen, strict=True):
                for key, values in parts.items():
                    tensors = torch.tensor(values, dtype=torch.float64)
                    getattr(together, name).setdefault(key, []).extend(tensors)
        return together

    def metrics(self, updates: int = 1) -> dict[str, float]:
        """Return the metrics; sums are averaged over the updates."""
        figures = {name: self.sum(name) / updates for name in self._sums}
        for name, parts in self._means.items():
            count = sum(weight.item() for _, weight in parts)
            if count:
                figures[name] = sum(total.item() for total, _ in parts) / count
        figures |= {name: min(part.item() for part in parts) for name, parts in self._lowest.items()}
        return figures | {name: max(part.item() for part in parts) for name, parts in self._highest.items()}


def _plain(parts: Mapping[str, Sequence[Tensor | tuple[Tensor, Tensor]]]) -> dict[str, list[float | list[float]]]:
    return {
        name: [[each.item() for each in part] if isinstance(part, tuple) else part.item() for part in numbers]
        for name, numbers in parts.items()
    }
