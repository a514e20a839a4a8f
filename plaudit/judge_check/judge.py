"""The judges that can be evaluated: a reward that scores single responses, or a model that compares two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from plaudit.config.reward import (
    ComparisonTable,
    JudgeTable,
    ProcessTable,
    RewardTable,
    RuleTable,
    parse_comparison,
)
from plaudit.config.table import read_toml
from plaudit.errors import ConfigError, Refused
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.score import open_client

Scorer = Callable[[Sequence[Item]], Sequence[Score | StepScores]]
Shown = tuple[Item, Item]


class PairJudge(Protocol):
    def margins(self, shown: Sequence[Shown]) -> list[float | ItemError]:
        """The margin of the first over the second of each pair: above 0 for the first, 0 for a tie."""


@dataclass(frozen=True)
class ScoringJudge:
    """Scores both responses of a pair in one call and as one group, in the order shown."""

    score: Scorer

    def values(self, items: Sequence[Item]) -> list[float | ItemError]:
        return [_value(result) for result in self.score(items)]

    def margins(self, shown: Sequence[Shown]) -> list[float | ItemError]:
        items = [replace(item, group=number) for number, both in enumerate(shown) for item in both]
        values = self.values(items)
        return [_difference(*both) for both in zip(values[::2], values[1::2], strict=True)]


class ComparingJudge:
    def __init__(self, table: ComparisonTable) -> None:
        from plaudit.reward.judges.comparison import Comparison
        from plaudit.reward.load import new_ask

        self._comparison = Comparison(table)
        self._ask = new_ask(table)

    def margins(self, shown: Sequence[Shown]) -> list[float | ItemError]:
        margins: dict[int, float | ItemError] = {}
        conversations = {}
        for place, (first, second) in enumerate(shown):
            try:
                conversations[place] = self._comparison.messages(first, second)
            except Refused as error:
                margins[place] = ItemError(error.type, str(error))
        answers = self._ask(list(conversations.values())) if conversations else ()
        for place, answer in zip(conversations, answers, strict=True):
            margins[place] = answer if isinstance(answer, ItemError) else self._comparison.read(answer)
        return [margins[place] for place in range(len(shown))]

    def close(self) -> None:
        self._ask.close()


@dataclass(frozen=True)
class OpenJudge:
    """sampled    repeated questions may get different answers
    threshold  the score from which a response counts as good; None if the scale is unknown
    """

    judge: PairJudge
    sampled: bool = False
    threshold: float | None = None


@contextmanager
def open_judge(
    model: str | None, urls: Sequence[str] = (), api_key: str | None = None, wait: float = 0.0
) -> Iterator[OpenJudge]:
    """Opens a judge from a model's name or directory, a TOML file with a reward's or comparison's table, or a
    server."""
    if urls:
        with open_client(model, urls, api_key, wait) as client:
            yield OpenJudge(ScoringJudge(lambda items: client.submit(items).result()))
        return
    if model is None:
        raise ConfigError("the judge is missing: set --model NAME, DIRECTORY or FILE.toml, or --url URL of a server")
    tree = read_toml(Path(model), "reward table") if model.endswith(".toml") else {"path": model}
    if tree.get("kind") == "comparison":
        comparison = parse_comparison(tree, model)
        comparing = ComparingJudge(comparison)
        try:
            yield OpenJudge(comparing, sampled=comparison.temperature > 0)
        finally:
            comparing.close()
        return
    from plaudit.reward import complete, load_reward

    table = complete(tree, model)
    reward = load_reward(table)
    sampled = isinstance(table, JudgeTable) and table.temperature > 0
    try:
        yield OpenJudge(ScoringJudge(reward.score), sampled, _threshold(table))
    finally:
        reward.close()


def _threshold(table: RewardTable) -> float | None:
    if isinstance(table, JudgeTable):
        return (table.low + table.high) / 2
    if isinstance(table, RuleTable):
        return (table.right + table.wrong) / 2
    return 0.5 if isinstance(table, ProcessTable) else None


def _value(result: Score | StepScores) -> float | ItemError:
    if result.error is not None:
        return result.error
    value = result.aggregate if isinstance(result, StepScores) else result.value
    assert value is not None, "a result without an error must have a value"
    return value


def _difference(first: float | ItemError, second: float | ItemError) -> float | ItemError:
    if isinstance(first, ItemError):
        return first
    return second if isinstance(second, ItemError) else first - second
