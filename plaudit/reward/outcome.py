"""One score for a response, read from a sequence classifier. Torch-free: the HTTP process runs this, not the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import OutcomeTable
from plaudit.errors import ConfigError, ModelError, Refused, nearest
from plaudit.records import Item, ItemError, Score
from plaudit.reward.intake import Intake
from plaudit.reward.work import ModelInfo, Work


class OutcomeReading:
    def __init__(self, table: OutcomeTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        if facts.causal:
            raise ModelError(
                f"{facts.name} is a causal LM, which has no score; give a ...ForSequenceClassification model, "
                'or kind = "process" with the format it was trained in'
            )
        self.table = table
        self.facts = facts
        self.apart = table.answer == "apart"
        self.end = tokenizer.eos_token_id
        if table.end and self.end is None:
            raise ConfigError(f"end = true, but the tokenizer of {facts.name} has no end token; set end = false")
        self.intake = Intake(tokenizer, facts, table.max_tokens)
        self.weights = _weights(table, facts)

    def prepare(self, item: Item) -> Work:
        self.intake.refuse_huge(item)
        tokens = self._tokens(item)
        if not tokens:
            raise Refused("empty", "there is nothing to score: not one token")
        over = len(tokens) - self.intake.limit
        ended = self.table.end and (item.prompt is not None or (item.messages is not None and self.apart))
        if over > 0 and item.truncate == "right":
            # The end of the response is cut, not the token it is read at.
            tokens = [*tokens[: self.intake.limit - 1], tokens[-1]] if ended else tokens[: self.intake.limit]
        else:
            tokens, _ = self.intake.cut(tokens, len(tokens) - 1, len(tokens) - 1, item.truncate)
        last = len(tokens) - 1
        positions = (last,) if self.table.pool == "last" else tuple(range(last + 1))
        return Work(tokens, positions, None, 0, over > 0)

    def foresee(self, items: Sequence[Item]) -> None:
        """Items that `prepare` will be asked for, so that their conversations are rendered together."""
        chats = [item.messages[:-1] if item.messages is not None and self.apart else item.prompt for item in items]
        self.intake.foresee([chat for chat in chats if isinstance(chat, tuple)])

    def finish(self, work: Work, values: np.ndarray) -> Score:
        if not np.isfinite(values).all():
            error = ItemError("nonfinite_score", f"{self.facts.name} gave a score that is not a finite number")
            return Score(error=error, truncated=work.truncated, tokens=len(work.tokens))
        wide = values.astype(np.float64)
        pooled = wide[0] if len(wide) == 1 else wide.mean(axis=0)
        value = float(pooled @ self.weights)
        if self.table.standardise is not None:
            value = (value - self.table.standardise.mean) / self.table.standardise.std
        labels = self.facts.labels
        attributes = dict(zip(labels, map(float, pooled), strict=True)) if len(labels) > 1 else {}
        return Score(value, attributes=attributes, truncated=work.truncated, tokens=len(work.tokens))

    def _tokens(self, item: Item) -> list[int]:
        if item.tokens is not None:
            return self.intake.tokens(item.tokens)
        if item.text is not None:
            return self.intake.text(item.text)
        if item.messages is not None:
            answer = self.intake.answer(item.messages)
            if self.apart:
                return self._answered(self.intake.opening(item.messages[:-1]), answer)
            return self.intake.conversation(item.messages)
        assert item.prompt is not None
        assert item.response is not None
        opening = self.intake.prompt(item.prompt) if isinstance(item.prompt, str) else self.intake.opening(item.prompt)
        response = item.response if isinstance(item.response, str) else _joined(item.response)
        return self._answered(opening, response)

    def _answered(self, opening: list[int], response: str) -> list[int]:
        if response == "" and not self.table.end:
            raise Refused("empty", "the response is empty, and with end = false nothing stands for it")
        return [*opening, *self.intake.content(response), *([self.end] if self.table.end else [])]


def _joined(steps: tuple[str, ...]) -> str:
    if not all(isinstance(step, str) for step in steps):
        raise Refused("bad_steps", "each step must be a text")
    return "".join(steps)


def _weights(table: OutcomeTable, facts: ModelInfo) -> np.ndarray:
    if table.weights is None:
        if len(facts.labels) != 1:
            raise ConfigError(
                f"{facts.name} scores {len(facts.labels)} labels ({', '.join(facts.labels[:8])}); "
                "say what each counts, for instance weights = { " + f'"{facts.labels[0]}" = 1.0 ' + "}"
            )
        return np.ones(1)
    for name in table.weights:
        if name not in facts.labels:
            raise ConfigError(
                f"weights names the label {name!r}, which {facts.name} lacks; {nearest(name, facts.labels)}"
            )
    return np.array([table.weights.get(label, 0.0) for label in facts.labels])
