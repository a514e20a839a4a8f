"""An LLM judge: builds its prompt and parses a score from its answer. `backends.py` runs the requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from plaudit.config.reward import JudgeTable
from plaudit.errors import Refused
from plaudit.records import Item, ItemError, Score
from plaudit.reward.reward import Result
from plaudit.reward.rules.rule import prompt_and_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Conversation = list[dict[str, str]]
PLACES = re.compile(r"\{(prompt|response|truth)\}")
OPEN, CLOSE = "<think>", "</think>"
THOUGHT = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)


class Ask(Protocol):
    def __call__(self, conversations: Sequence[Conversation]) -> Sequence[str | ItemError]:
        """The final answer (`final_answer`) to each conversation, or an error."""

    def close(self) -> None: ...


class Judge:
    def __init__(self, table: JudgeTable) -> None:
        self.table = table
        self._pattern = re.compile(table.pattern)

    def messages(self, item: Item) -> Conversation:
        turn = prompt_and_response(item)
        if isinstance(turn, ItemError):
            raise Refused(turn.type, turn.message)
        prompt, response = turn
        if item.truth is None and "{truth}" in self.table.template:
            raise Refused("no_truth", "the judge's template uses {truth}, but the item has no truth")
        values = {"prompt": as_text(prompt), "response": response, "truth": as_text(item.truth)}
        # Substituted in one pass: a literal {truth} in a response is not replaced.
        content = PLACES.sub(lambda place: values[place[1]], self.table.template)
        system = [] if self.table.system is None else [{"role": "system", "content": self.table.system}]
        return [*system, {"role": "user", "content": content}]

    def read(self, text: str) -> Score:
        """Parses the number in the last match; an unreadable or out-of-range number is an error."""
        number = None
        for match in self._pattern.finditer(text):
            number = match[1]
        try:
            value = float(number) if number is not None else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            return _unreadable(f"the judge's answer has no number that matches {self.table.pattern!r}")
        if not self.table.low <= value <= self.table.high:
            return _unreadable(f"the judge gave {value:g}; expected {self.table.low:g} to {self.table.high:g}")
        return Score(value)


class JudgeReward:
    def __init__(self, judge: Judge, ask: Ask) -> None:
        self.judge = judge
        self.ask = ask

    def score(self, items: Sequence[Item]) -> list[Result]:
        results: list[Result | None] = []
        conversations = []
        for item in items:
            try:
                conversations.append(self.judge.messages(item))
                results.append(None)
            except Refused as error:
                results.append(Score(error=ItemError(error.type, str(error))))
        answers = iter(self.ask(conversations) if conversations else ())
        return [self._read(next(answers)) if result is None else result for result in results]

    def close(self) -> None:
        self.ask.close()

    def _read(self, answer: str | ItemError) -> Result:
        return Score(error=answer) if isinstance(answer, ItemError) else self.judge.read(answer)


def final_answer(text: str, finish: object, max_tokens: int) -> str | ItemError:
    """The answer without thinking. An answer that was cut has no verdict yet, whatever its last number is; neither has
    one whose end is unknown, because the server sends no finish_reason."""
    if finish == "stop":
        return without_thinking(text)
    if finish == "length":
        return ItemError(
            "judge_unreadable",
            f"the judge's answer was cut (finish_reason 'length'): it needs more than max_tokens = {max_tokens}, or "
            "than its context; set max_tokens higher",
        )
    if finish is None:
        return ItemError(
            "judge_unreadable",
            "the judge's server sent no finish_reason, so a finished answer looks like one that was cut; use a server "
            "that sends it",
        )
    return ItemError("judge_unreadable", f"the judge's answer has finish_reason {str(finish)[:40]!r}; expected 'stop'")


def without_thinking(text: str) -> str:
    """Removes every `<think>...</think>`, what precedes an end without a begin (chat templates may write the begin),
    and what follows a begin without an end."""
    return THOUGHT.sub("", text).rpartition(CLOSE)[2].partition(OPEN)[0]


def generated_answer(
    tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], tokens: Sequence[int], text: str, finish: str,
    max_tokens: int,
) -> str | ItemError:  # fmt: skip
    """The final answer of a model that our engine runs."""
    if any(each.special and each.content in (OPEN, CLOSE) for each in tokenizer.added_tokens_decoder.values()):
        text = str(tokenizer.decode(list(tokens)))  # the engine's text has no special tokens
    if str(tokenizer.decode(list(prompt[-8:]))).rstrip().endswith(OPEN):  # written by the chat template
        text = OPEN + text
    return final_answer(text, finish, max_tokens)


def as_text(value: Any) -> str:
    """A text unchanged, a conversation as one line per turn, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value):
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _unreadable(message: str) -> Score:
    return Score(error=ItemError("judge_unreadable", message))
