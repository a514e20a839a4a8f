"""Prompts filtered and ordered by pass rate: the mean rewards in a run with rollouts.

The i-th prompt is a pure function of that run and (seed, i), as for any other source: it works in every placement, and
a resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from plaudit.config.rl import RlDataTable
from plaudit.errors import DataError
from plaudit.records import Prompt, Sample
from plaudit.train.data.prompts import Prompts
from plaudit.train.data.rows import shuffled
from plaudit.train.rollouts.dump import Dump


class MeasuredPrompts:
    def __init__(self, source: Prompts, data: RlDataTable, seed: int) -> None:
        assert data.measured is not None
        self.source = source
        self.seed = seed
        rates = pass_rates(Path(data.measured))
        items = source.items()
        known = [(rates[prompt.token_ids], prompt) for prompt in items if prompt.token_ids in rates]
        if not known:
            raise DataError(
                f"data.measured = {data.measured!r} has rollouts of {len(rates)} prompts, and none is among the "
                f"{len(items)} of [data]: measure them with the same model, [data] and seed"
            )
        low, high = data.keep or (float("-inf"), float("inf"))
        kept = [(rate, prompt) for rate, prompt in known if low <= rate <= high]
        if not kept:
            seen = sorted(rate for rate, _ in known)
            raise DataError(
                f"data.keep = [{low:g}, {high:g}] leaves none of {len(known)} measured prompts, whose pass rates are "
                f"{seen[0]:g} to {seen[-1]:g}: widen it"
            )
        mixed = [kept[i] for i in shuffled(len(kept), f"{seed} measured")]  # ties are shuffled, not in file order
        if data.order != "shuffled":
            mixed.sort(key=lambda each: each[0], reverse=data.order == "easy-first")
        self.by_rate = data.order != "shuffled"
        self.kept = [prompt for _, prompt in mixed]

    def items(self) -> list[Prompt]:
        return self.kept

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        return [self.kept[self._place(index)] for index in indices]

    def heldout(self) -> list[Prompt]:
        return self.source.heldout()

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return self.source.right(prompt, sample)

    def _place(self, index: int) -> int:
        epoch, position = divmod(index, len(self.kept))
        if self.by_rate and epoch == 0:
            return position
        return shuffled(len(self.kept), f"{self.seed} {epoch}")[position]


def pass_rates(run: Path) -> dict[tuple[int, ...] | None, float]:
    """Return the mean reward of the responses to each prompt, by its tokens."""
    dump = Dump.find(run)
    rewards: dict[tuple[int, ...] | None, list[float]] = {}
    for step in dump.steps():
        for sample in dump.read(step)[0]:
            if (total := sample.total_reward) is not None:
                rewards.setdefault(sample.prompt_ids, []).append(total)
    return {prompt: fmean(scores) for prompt, scores in rewards.items()}
