"""A Python function as a reward in this process, for `plaudit.train(..., reward=function)`.

It is called like a rule's function (`user_function.py`), but without a separate process, time limit or sandbox, and
with the row's columns unchanged.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from plaudit.config.reward import RuleTable
from plaudit.errors import ConfigError, PlauditError
from plaudit.records import Item, ItemError, Score
from plaudit.reward.reward import Result
from plaudit.reward.rules.rule import by_prompt, columns_read, prompt_and_response, score_or_error
from plaudit.reward.rules.rule_worker import called, described
from plaudit.reward.rules.user_function import UserFunction
from plaudit.reward.version import digest


def name_of(function: Callable[..., Any]) -> str:
    """module:name, as in `rule = "function"`. A function of a notebook or a script is in `__main__`."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


class FunctionReward:
    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self.function = UserFunction(function)
        except TypeError as error:
            raise ConfigError(f"the reward {error}") from None
        table = RuleTable(rule="function", function=name_of(function))
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):  # defined interactively, or an object with __call__
            source = ""
        self.version = f"0-{digest(table, hashlib.sha256(source.encode()).hexdigest())}"

    def score(self, items: Sequence[Item]) -> list[Result]:
        parts = by_prompt(items) if self.function.batched else [[item] for item in items]
        return [
            Score(error=answer, version=self.version)
            if isinstance(answer, ItemError)
            else Score(answer, version=self.version)
            for part in parts
            for answer in self._answers(part)
        ]

    def close(self) -> None:
        """Nothing to close."""

    def _answers(self, items: Sequence[Item]) -> list[float | ItemError]:
        turns = [self._turn(item) for item in items]
        readable = [turn for turn in turns if not isinstance(turn, ItemError)]
        answers = iter(self._call(items[0], readable) if readable else [])
        return [turn if isinstance(turn, ItemError) else next(answers) for turn in turns]

    def _turn(self, item: Item) -> tuple[Any, str, dict[str, Any]] | ItemError:
        turn = prompt_and_response(item)
        if isinstance(turn, ItemError):
            return turn
        columns = columns_read(item, self.function.columns, self.function.required)
        return columns if isinstance(columns, ItemError) else (*turn, columns)

    def _call(self, item: Item, turns: Sequence[tuple[Any, str, dict[str, Any]]]) -> list[float | ItemError]:
        responses = [response for _, response, _ in turns]
        prompt, response, columns = turns[0]
        request = {"prompt": prompt, "truth": item.truth, "columns": columns}
        try:
            reply = called(self.function, {**request, "response": response, "responses": responses})
        except PlauditError:  # a signal, or an error of a reward server the function calls: handled by the run
            raise
        except Exception as error:
            return [ItemError("rule_failed", described(error))] * len(turns)
        return [score_or_error(each) for each in reply.get("scores", [reply] * len(turns))]
