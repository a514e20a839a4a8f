"""A language model that compares two responses. Used to evaluate judges, not as a reward."""

from __future__ import annotations

import re

from plaudit.config.reward import ComparisonTable
from plaudit.errors import Refused
from plaudit.records import Item, ItemError
from plaudit.reward.judges.judge import Conversation, as_text
from plaudit.reward.rules.rule import prompt_and_response

PLACES = re.compile(r"\{(prompt|first|second|truth)\}")
VERDICTS = {
    "a": 1.0, "1": 1.0, "first": 1.0, "b": -1.0, "2": -1.0, "second": -1.0, "c": 0.0, "0": 0.0, "tie": 0.0,
}  # fmt: skip


class Comparison:
    def __init__(self, table: ComparisonTable) -> None:
        self.table = table
        self._pattern = re.compile(table.pattern)

    def messages(self, first: Item, second: Item) -> Conversation:
        turns = []
        for turn in map(prompt_and_response, (first, second)):
            if isinstance(turn, ItemError):
                raise Refused(turn.type, turn.message)
            turns.append(turn)
        if first.truth is None and "{truth}" in self.table.template:
            raise Refused("no_truth", "the judge's template uses {truth}, but the row has no truth")
        values = {
            "prompt": as_text(turns[0][0]), "first": turns[0][1], "second": turns[1][1], "truth": as_text(first.truth),
        }  # fmt: skip
        # Substituted in one pass: a literal {second} in a response is not replaced.
        content = PLACES.sub(lambda place: values[place[1]], self.table.template)
        system = [] if self.table.system is None else [{"role": "system", "content": self.table.system}]
        return [*system, {"role": "user", "content": content}]

    def read(self, text: str) -> float | ItemError:
        """1 if the first response is better, -1 for the second, 0 for a tie; the last match counts."""
        verdict = None
        for match in self._pattern.finditer(text):
            verdict = match[1]
        if verdict is None or verdict.lower() not in VERDICTS:
            found = "gave no verdict" if verdict is None else f"gave the verdict {verdict!r}"
            return ItemError("judge_unreadable", f"the judge {found}; {self.table.pattern!r} must match A, B or C")
        return VERDICTS[verdict.lower()]
