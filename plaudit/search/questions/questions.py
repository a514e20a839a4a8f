"""Loads questions from a world, a gym or a file, each with its correct answer if known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.config.reward import RuleTable
from plaudit.config.search import QuestionsTable
from plaudit.errors import DataError
from plaudit.records import Item, Prompt
from plaudit.search.questions.answers import Alike
from plaudit.train.data.encoder import PromptEncoder
from plaudit.train.data.rows import Row, read_rows
from plaudit.worlds import get_world


@dataclass(frozen=True, slots=True)
class Question:
    """prompt  as passed to the PRM: text, or the messages of a conversation
    text    for display
    check   whether an answer is correct, or None if undecided; without it the answer is compared with the truth
    """

    index: int
    prompt: str | tuple[dict[str, Any], ...]
    text: str
    prompt_ids: tuple[int, ...]
    truth: str | None = None
    check: Callable[[str], bool | None] | None = None

    def right(self, answer: str | None, alike: Alike) -> bool | None:
        if self.truth is None:
            return None
        if answer is None:
            return False
        return alike(answer, self.truth) if self.check is None else self.check(answer)


def open_questions(
    table: QuestionsTable, tokenizer: Any, seed: int, checker: GymChecker | None = None
) -> list[Question]:
    encoder = PromptEncoder(table, tokenizer)
    if table.gym is not None:
        from plaudit.train.data.gym import HELDOUT_SEED, GymItems  # reasoning-gym is an optional dependency

        assert table.limit is not None, "the table must have a limit"
        items = GymItems(encoder, table, seed + HELDOUT_SEED, table.limit)
        return [_gym_question(i, prompt, checker) for i, prompt in enumerate(items.prompts(range(len(items))))]
    if table.world is not None:
        assert table.limit is not None, "the table must have a limit"
        problems = get_world(table.world, seed).heldout(table.limit)
        if len(problems) < table.limit:
            raise DataError(
                f"{table.world} has {len(problems)} held-out problems, but limit is {table.limit}; lower it"
            )
        rows = [
            Row({"prompt": p.prompt, table.truth: str(p.answer)}, f"{table.world}[{i}]") for i, p in enumerate(problems)
        ]
    else:
        assert table.path is not None
        rows = read_rows(Path(table.path))[: table.limit]
    return [_question(i, prompt) for i, prompt in enumerate(encoder.rows(rows, table.truth))]


def question(index: int, fields: Mapping[str, Any], table: QuestionsTable, tokenizer: Any, origin: str) -> Question:
    (prompt,) = PromptEncoder(table, tokenizer).rows([Row(dict(fields), origin)], table.truth)
    return _question(index, prompt)


class GymChecker:
    """Runs the scorer of a gym task in a separate process: a task may have many correct answers."""

    def __init__(self) -> None:
        from plaudit.reward.rules.rule import RuleReward

        self.rule = RuleReward(RuleTable(kind="rule", rule="gym", processes=1))

    def __call__(self, truth: Any, answer: str) -> bool | None:
        (score,) = self.rule.score([Item(prompt="", response=answer, truth=truth)])
        return None if score.error is not None else getattr(score, "value", 0.0) >= 1

    def close(self) -> None:
        self.rule.close()


def _question(index: int, prompt: Prompt) -> Question:
    truth = None if prompt.truth is None else str(prompt.truth)
    messages = prompt.extra.get("messages")
    ids = prompt.token_ids or ()
    return Question(index, prompt.text if messages is None else tuple(messages), prompt.text, ids, truth)


def _gym_question(index: int, prompt: Prompt, checker: GymChecker | None) -> Question:
    truth = prompt.truth
    plain = _question(index, Prompt(prompt.text, prompt.token_ids, truth["item"]["answer"], prompt.extra))
    check = None if checker is None else lambda answer: checker(truth, answer)
    return Question(index, plain.prompt, plain.text, plain.prompt_ids, plain.truth, check)
