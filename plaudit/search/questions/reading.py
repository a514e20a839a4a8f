"""Interprets a response: whether it is finished, its answer, and which answers are the same."""

from __future__ import annotations

import re

from plaudit.config.search import StepsTable
from plaudit.search.questions.equivalence import Equivalence, open_equivalence


class AnswerReading:
    """alike   comparison of answers; by default the one set in the table"""

    def __init__(self, table: StepsTable, alike: Equivalence | None = None) -> None:
        self.alike = alike or open_equivalence(table.equivalence)
        self._answer = re.compile(table.answer)
        self._final = None if table.final is None else re.compile(table.final)

    def answer(self, response: str) -> str | None:
        answer = None
        for match in self._answer.finditer(response):
            answer = match[1]
        return answer

    def final(self, response: str) -> bool:
        return self._final is not None and self._final.search(response) is not None

    def close(self) -> None:
        self.alike.close()
