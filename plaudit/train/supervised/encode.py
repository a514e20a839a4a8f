"""Encodes rows to examples. Prompt, response and steps are tokenised separately, so step positions are exact."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from plaudit.config import PreferenceRecipe, PrmRecipe, Regression, RewardRecipe, SftRecipe
from plaudit.errors import DataError
from plaudit.models import encode, render_chat
from plaudit.train.data.rows import Row
from plaudit.train.supervised.examples import (
    Comparison,
    Demonstration,
    Example,
    Labelled,
    Preferred,
    Rating,
    StepTargets,
)


class Encoder:
    """Turns the rows of a recipe's task into examples of at most `longest` tokens a sequence."""

    def __init__(
        self, recipe: SftRecipe | RewardRecipe | PrmRecipe | PreferenceRecipe, tokenizer: Any, longest: int,
        way_to_more: str = "",
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.longest = longest
        self.way_to_more = way_to_more
        # The tokens that the tokenizer puts before a text: BOS, or none.
        added = tokenizer.encode("")
        self.begin = added[:1] if added[:1] == [tokenizer.bos_token_id] else []
        # In a world the same steps come again and again.
        self._step = lru_cache(maxsize=1 << 16)(lambda text: encode(tokenizer, text))

    def __call__(self, row: Row) -> Example:
        example = self._example(row)
        most = _longest(example)
        if most > self.longest:
            cure = f"shorten or remove it{self.way_to_more}"
            raise DataError(f"{row.origin}: {most} tokens exceed the model's {self.longest}; {cure}")
        return example

    def _example(self, row: Row) -> Example:
        if self.recipe.task == "sft":
            return self._demonstration(row)
        if self.recipe.task == "prm":
            return self._steps(row)
        if self.recipe.task == "preference":
            return self._preferred(row) if self.recipe.algorithm.method.pairs else self._labelled(row)
        if isinstance(self.recipe.algorithm, Regression):
            return self._rating(row, self.recipe.algorithm.attributes)
        return self._comparison(row)

    def _prompt(self, row: Row) -> list[int]:
        if "messages" in row.fields:
            return render_chat(self.tokenizer, row.fields["messages"], add_generation_prompt=True)
        return [*self.begin, *encode(self.tokenizer, row.text("prompt"))]

    def _finished(self, text: str) -> list[int]:
        return [*encode(self.tokenizer, text), self.tokenizer.eos_token_id]

    def _demonstration(self, row: Row) -> Demonstration:
        messages = row.fields.get("messages")
        if messages is None:
            prompt, response = self._prompt(row), row.text("response")
        else:
            prompt, response = self._conversation(row, messages)
        return Demonstration((*prompt, *self._finished(response)), len(prompt))

    def _conversation(self, row: Row, messages: Any) -> tuple[list[int], str]:
        answered = isinstance(messages, list) and messages and isinstance(messages[-1], dict)
        if not answered or messages[-1].get("role") != "assistant" or not isinstance(messages[-1].get("content"), str):
            raise DataError(f"{row.origin}: messages must be a list that ends with the assistant's answer")
        return render_chat(self.tokenizer, messages[:-1], add_generation_prompt=True), messages[-1]["content"]

    def _comparison(self, row: Row) -> Comparison:
        prompt = self._prompt(row)
        chosen, rejected = (self._finished(row.text(key)) for key in ("chosen", "rejected"))
        return Comparison((*prompt, *chosen), (*prompt, *rejected), row.number("margin", 0.0))

    def _preferred(self, row: Row) -> Preferred:
        prompt, chosen, rejected = self._prompt(row), row.text("chosen"), row.text("rejected")
        if chosen == rejected:
            raise DataError(
                f"{row.origin}: chosen and rejected are both {chosen[:40]!r}: remove the row, it has no preference"
            )
        return Preferred(tuple(prompt), tuple(self._finished(chosen)), tuple(self._finished(rejected)))

    def _labelled(self, row: Row) -> Labelled:
        label = row.fields.get("label")
        if not isinstance(label, bool):
            raise DataError(
                f"{row.origin}: needs a 'label', true or false, got {label!r}; its keys are {sorted(row.fields)}; "
                "for pairs of chosen and rejected set algorithm.name = dpo, ipo, orpo or simpo"
            )
        return Labelled(tuple(self._prompt(row)), tuple(self._finished(row.text("response"))), label)

    def _rating(self, row: Row, attributes: tuple[str, ...]) -> Rating:
        ratings = tuple(row.number(name) if row.fields.get(name) is not None else math.nan for name in attributes)
        if all(map(math.isnan, ratings)):
            raise DataError(f"{row.origin}: needs a number for at least one of {list(attributes)}")
        return Rating((*self._prompt(row), *self._finished(row.text("response"))), ratings)

    def _steps(self, row: Row) -> StepTargets:
        """A step is read at its last token, the last step of a finished solution at the end-of-text token after it."""
        steps, labels = row.fields.get("steps"), row.fields.get("labels")
        if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels) or not steps:
            raise DataError(f"{row.origin}: needs lists 'steps' and 'labels' of the same length, at least 1")
        tokens, ends = self._prompt(row), []
        for step, label in zip(steps, labels, strict=True):
            if not isinstance(step, str) or not step:
                raise DataError(f"{row.origin}: each step must be a non-empty text, got {step!r}")
            if not isinstance(label, int | float) or not 0 <= label <= 1:
                raise DataError(f"{row.origin}: each label must be between 0 and 1, got {label!r}")
            tokens += self._step(step)
            ends.append(len(tokens) - 1)
        if row.fields.get("finished", True):
            tokens.append(self.tokenizer.eos_token_id)
            ends[-1] = len(tokens) - 1
        return StepTargets(tuple(tokens), tuple(ends), tuple(float(label) for label in labels))


def _longest(example: Example) -> int:
    """Tokens of an example's longest sequence."""
    if isinstance(example, Preferred | Labelled):
        return len(example.prompt) + max(map(len, example.responses))
    return max(map(len, (example.chosen, example.rejected) if isinstance(example, Comparison) else (example.tokens,)))
