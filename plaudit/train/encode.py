"""Rows to examples. Prompt, response and steps are tokenised apart, so positions of steps are known, not guessed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from plaudit.config import BaseRecipe, Regression
from plaudit.errors import DataError
from plaudit.models import encode, render_chat
from plaudit.train.examples import Comparison, Demonstration, Example, Rating, StepTargets, token_count
from plaudit.train.rows import Row


def encoder(recipe: BaseRecipe, tokenizer: Any, longest: int) -> Callable[[Row], Example]:
    """The function that turns a row of this recipe's task into an example of at most `longest` tokens."""
    task = recipe.task  # type: ignore[attr-defined]
    algorithm = recipe.algorithm  # type: ignore[attr-defined]

    def turn(row: Row) -> Example:
        example: Example
        if task == "sft":
            example = _demonstration(row, tokenizer)
        elif task == "prm":
            example = _steps(row, tokenizer)
        elif isinstance(algorithm, Regression):
            example = _rating(row, tokenizer, algorithm.attributes)
        else:
            example = _comparison(row, tokenizer)
        most = (
            max(len(example.chosen), len(example.rejected)) if isinstance(example, Comparison) else token_count(example)
        )
        if most > longest:
            raise DataError(f"{row.origin}: {most} tokens, but the model takes {longest}; shorten or remove this item")
        return example

    return turn


def prompt_ids(row: Row, tokenizer: Any) -> list[int]:
    if "messages" in row.fields:
        return render_chat(tokenizer, row.fields["messages"], add_generation_prompt=True)
    return [*bos_ids(tokenizer), *encode(tokenizer, row.text("prompt"))]


def bos_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: its begin token, or nothing."""
    added = tokenizer.encode("")
    return [tokenizer.bos_token_id] if added and added[0] == tokenizer.bos_token_id else []


def _finished(tokenizer: Any, text: str) -> list[int]:
    return [*encode(tokenizer, text), tokenizer.eos_token_id]


def _demonstration(row: Row, tokenizer: Any) -> Demonstration:
    messages = row.fields.get("messages")
    if messages is not None:
        if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
            raise DataError(f"{row.origin}: messages must be a list that ends with the assistant's answer")
        prompt = render_chat(tokenizer, messages[:-1], add_generation_prompt=True)
        response = _finished(tokenizer, messages[-1]["content"])
    else:
        prompt, response = prompt_ids(row, tokenizer), _finished(tokenizer, row.text("response"))
    return Demonstration((*prompt, *response), len(prompt))


def _comparison(row: Row, tokenizer: Any) -> Comparison:
    prompt = prompt_ids(row, tokenizer)
    chosen, rejected = (_finished(tokenizer, row.text(key)) for key in ("chosen", "rejected"))
    return Comparison((*prompt, *chosen), (*prompt, *rejected), row.number("margin", 0.0))


def _rating(row: Row, tokenizer: Any, attributes: tuple[str, ...]) -> Rating:
    ratings = tuple(row.number(name) if row.fields.get(name) is not None else math.nan for name in attributes)
    if all(map(math.isnan, ratings)):
        raise DataError(f"{row.origin}: needs a number for at least one of {list(attributes)}")
    return Rating((*prompt_ids(row, tokenizer), *_finished(tokenizer, row.text("response"))), ratings)


def _steps(row: Row, tokenizer: Any) -> StepTargets:
    """A step is read at its last token, the last step of a finished solution at the end-of-text token after it."""
    steps, labels = row.fields.get("steps"), row.fields.get("labels")
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels) or not steps:
        raise DataError(f"{row.origin}: needs lists 'steps' and 'labels' of the same length, at least 1")
    tokens, ends = prompt_ids(row, tokenizer), []
    for step, label in zip(steps, labels, strict=True):
        if not isinstance(step, str) or not step:
            raise DataError(f"{row.origin}: each step must be a text that is not empty, found {step!r}")
        if isinstance(label, str) or label is None or not 0 <= label <= 1:
            raise DataError(f"{row.origin}: each label must be between 0 and 1, found {label!r}")
        tokens += encode(tokenizer, step)
        ends.append(len(tokens) - 1)
    if row.fields.get("finished", True):
        tokens.append(tokenizer.eos_token_id)
        ends[-1] = len(tokens) - 1
    return StepTargets(tuple(tokens), tuple(ends), tuple(float(label) for label in labels))
