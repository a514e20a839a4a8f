"""Prompts of a world, a file, a gym or several sources, each with the reference for checking an answer.

The i-th training prompt is a pure function of (seed, i): a resumed run needs no reader state to see the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit.config.rl import RlDataTable
from plaudit.errors import DataError
from plaudit.records import Prompt, Sample
from plaudit.train.data.encoder import PromptEncoder, RawPrompt, messages_of
from plaudit.train.data.rows import FileRows, Row
from plaudit.worlds import Sums
from plaudit.worlds.sums import Problem, judge


class Prompts(Protocol):
    def items(self) -> list[Prompt]:
        """Return all training prompts of a finite source."""

    def train(self, indices: Sequence[int]) -> list[Prompt]: ...

    def heldout(self) -> list[Prompt]: ...

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        """Whether the response is correct; None if unknown."""


class WorldPrompts:
    def __init__(self, world: Sums, encoder: PromptEncoder, data: RlDataTable) -> None:
        self.world = world
        self.encoder = encoder
        self.data = data

    def items(self) -> list[Prompt]:
        return self.train(range(self.data.limit or 0))

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        limit = self.data.limit
        return self._prompts([self.world.problem("train", i % limit if limit else i) for i in indices])

    def heldout(self) -> list[Prompt]:
        """Return problems of the world itself, even if part of the training uses longer chains."""
        plain = Sums(self.world.table.model_copy(update={"hard_share": 0.0}), self.world.seed)
        return self._prompts(plain.heldout(self.data.eval_items))

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return judge(Problem.parse(prompt.text), sample.text).right

    def _prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
        return self.encoder.prompts(
            [RawPrompt(each.prompt, str(each.answer), f"{self.data.world}[{each.prompt}]") for each in problems]
        )


class FilePrompts:
    def __init__(self, encoder: PromptEncoder, data: RlDataTable, seed: int) -> None:
        self.encoder = encoder
        self.data = data
        self.file = FileRows(data, seed)
        self._check([*self.file.rows, *self.file.heldout()])

    def items(self) -> list[Prompt]:
        return self._prompts(self.file.rows)

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        return self._prompts([self.file.train(index) for index in indices])

    def heldout(self) -> list[Prompt]:
        return self._prompts(self.file.heldout())

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return None

    def _prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        return self.encoder.rows(rows, self.data.truth)

    def _check(self, rows: Sequence[Row]) -> None:
        """Report an invalid row before the first step, not when it is drawn."""
        some_have_truth = any(row.fields.get(self.data.truth) is not None for row in rows)
        for row in rows:
            if row.fields.get("messages") is not None:
                messages_of(row)
            else:
                row.text("prompt")
            if some_have_truth and row.fields.get(self.data.truth) is None:
                raise DataError(
                    f"{row.origin}: has no {self.data.truth!r} (data.truth), which other items have; "
                    f"its keys are {sorted(row.fields)}"
                )
            if self.encoder.may_be_too_long(row):
                self._prompts([row])
