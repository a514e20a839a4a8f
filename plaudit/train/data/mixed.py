"""Mixes the prompts of several sources by weight.

Each block of 1000 prompts contains every source in proportion to its weight, shuffled by (seed, block): the source of
the i-th prompt and its index there are a pure function of (seed, i), so a resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plaudit.records import Prompt, Sample
from plaudit.train.data.prompts import Prompts
from plaudit.train.data.rows import shuffled

BLOCK = 1000


class MixedPrompts:
    """Each prompt has its source's name in `extra["source"]`."""

    def __init__(self, parts: Mapping[str, Prompts], weights: Mapping[str, float], seed: int) -> None:
        self.parts = parts
        self.seed = seed
        counts = shares(list(weights.values()), BLOCK)
        self.slots = [(name, count, rank) for name, count in zip(weights, counts, strict=True) for rank in range(count)]
        """A block in the order of the sources: each prompt's source, how many it has of a block, and its rank there."""

    def items(self) -> list[Prompt]:
        return [_of(name, prompt) for name, part in self.parts.items() for prompt in part.items()]

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        wanted: dict[str, list[int]] = {}
        for name, index in (places := [self.place(index) for index in indices]):
            wanted.setdefault(name, []).append(index)
        found = {name: iter(self.parts[name].train(numbers)) for name, numbers in wanted.items()}
        return [_of(name, next(found[name])) for name, _ in places]

    def heldout(self) -> list[Prompt]:
        return [_of(name, prompt) for name, part in self.parts.items() for prompt in part.heldout()]

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return self.parts[prompt.extra["source"]].right(prompt, sample)

    def place(self, index: int) -> tuple[str, int]:
        """Return the source of the i-th prompt, and its index there."""
        block, at = divmod(index, BLOCK)
        name, count, rank = self.slots[shuffled(BLOCK, f"{self.seed} mixture {block}")[at]]
        return name, block * count + rank


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into integers in proportion to the weights (largest remainder), at least 1 each."""
    exact = [max(1.0, weight / sum(weights) * total) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in range(total - sum(counts)):
        counts[by_remainder[i % len(counts)]] += 1
    while sum(counts) > total:  # raising the smallest to 1 is compensated by the largest
        counts[counts.index(max(counts))] -= 1
    return counts


def _of(source: str, prompt: Prompt) -> Prompt:
    return replace(prompt, extra={**prompt.extra, "source": source})
