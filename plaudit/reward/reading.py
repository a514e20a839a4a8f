"""Converts an item to tokens, and the values read by the model to a score. Needs no torch, as it runs in the HTTP
process; thread-safe.

`Intake` is shared by all readings. The readings of whole responses are here: one score of a sequence classifier, and
models without scores (log-probs of a causal LM, vectors of an encoder). Steps are in `process.py`.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import EmbeddingTable, LogprobsTable, OutcomeTable
from plaudit.errors import ConfigError, ModelError, PlauditError, Refused, RequestError, nearest
from plaudit.models import bos_ids, encode, render_chat, render_chats
from plaudit.models.text import refuse_surrogates
from plaudit.records import Item, ItemError, Score
from plaudit.reward.work import ModelInfo, Work

PROMPTS_KEPT = 64  # many responses to the same prompt arrive in a row
OPENINGS_KEPT = 1024  # a search sends the same conversations repeatedly, step by step
CHARACTERS_PER_TOKEN = 64  # far above any real text; a longer item is rejected before tokenising
Message = Mapping[str, Any]


class Intake:
    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo, max_tokens: int | None, bos: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.facts = facts
        self.limit = min(facts.max_positions, max_tokens or facts.max_positions)
        self.way = facts.way_to_more if self.limit == facts.max_positions else ""
        self.most_characters = CHARACTERS_PER_TOKEN * self.limit
        self.begin = bos_ids(tokenizer)
        if bos and not self.begin:
            if tokenizer.bos_token_id is None:
                raise ModelError(
                    f"the tokenizer of {facts.name} has no BOS token, but the format needs one; set it "
                    "in the tokenizer's config"
                )
            self.begin = [tokenizer.bos_token_id]
        self._prompt = lru_cache(maxsize=PROMPTS_KEPT)(self._encode_prompt)
        self._openings: OrderedDict[str, array[int]] = OrderedDict()
        self._openings_lock = threading.Lock()

    def refuse_huge(self, item: Item) -> None:
        """Rejects a text that cannot fit before tokenising it, which takes time."""
        size, most = _size(item), self.most_characters
        if size > most:
            unit = "characters" if item.tokens is None else "tokens"
            raise Refused(
                "too_long", f"{size} {unit} cannot fit into the {self.limit} tokens that {self.facts.name} accepts; "
                f"at most {most} are accepted, even with truncate",
            )  # fmt: skip

    def content(self, text: str) -> list[int]:
        """Tokens of untrusted text, in which nothing is a control token."""
        if not isinstance(text, str):
            raise Refused("bad_text", f"expected text, got {type(text).__name__}")
        try:
            return encode(self.tokenizer, text)
        except RequestError as error:
            raise Refused("bad_text", str(error)) from error

    def prompt(self, text: str) -> list[int]:
        """The BOS token and a plain text prompt."""
        if text == "" and not self.begin:
            raise Refused(
                "empty", f"the prompt is empty and {self.facts.name} has no BOS token; expected at least one character"
            )
        return list(self._prompt(text))

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The rendered conversation including the assistant's generation prompt."""
        key = _as_json(messages)
        tokens = self._kept(key)
        if tokens is None:
            tokens = self._keep(key, self.templated(json.loads(key), add_generation_prompt=True))
        return tokens.tolist()

    def prerender(self, openings: Sequence[Sequence[Message]]) -> None:
        """Renders openings in one batch, which saves round trips to the template's process."""
        with suppress(PlauditError, RecursionError):  # errors are reported when the opening is requested
            most = self.most_characters
            keys = [key for key in {*map(_as_json, openings)} if len(key) <= most and self._kept(key) is None]
            if keys:
                rendered = render_chats(self.tokenizer, list(map(json.loads, keys)), add_generation_prompt=True)
                for key, ids in zip(keys, rendered, strict=True):
                    self._keep(key, ids)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        return self.templated(messages, add_generation_prompt=False)

    def text(self, text: str) -> list[int]:
        """A rendered text: control strings in it are control tokens. The BOS token is not duplicated."""
        if text == "":
            raise Refused("empty", "the text is empty; expected at least one character")
        try:
            ids = encode(self.tokenizer, text, control=True)
        except RequestError as error:
            raise Refused("bad_text", str(error)) from error
        begin = self.begin
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def rendered(self, text: str, special: bool) -> list[int]:
        """A rendered text as other servers tokenise it: control strings are control tokens, and with `special` the
        tokenizer adds its special tokens even if they are present."""
        self.refuse_huge(Item(text=text))
        try:
            refuse_surrogates(text)
        except RequestError as error:
            raise Refused("bad_text", str(error)) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def tokens(self, ids: Sequence[Any]) -> list[int]:
        if not ids:
            raise Refused("empty", "the list of tokens is empty; expected at least one")
        size = self.facts.vocab_size
        for place, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < size:
                raise Refused(
                    "bad_tokens",
                    f"token {place} is {str(token)[:40]}; expected integers 0..{size - 1} for {self.facts.name}",
                )
        return list(ids)

    def cut(
        self, tokens: list[int], first_read: int, last_read: int, truncate: Literal["left", "right"] | None
    ) -> tuple[list[int], int]:
        """The truncated tokens, and the number of tokens removed before the first position read."""
        over = len(tokens) - self.limit
        if over <= 0:
            return tokens, 0
        problem = f"{len(tokens)} tokens exceed the limit of {self.limit} for {self.facts.name}"
        if truncate is None:
            raise Refused("too_long", f"{problem}; shorten it, or set the side to truncate with truncate{self.way}")
        if truncate == "right":
            if last_read >= self.limit:
                raise Refused(
                    "too_long",
                    f"{problem}, and truncating on the right would remove position {last_read}, which is read",
                )
            return tokens[: self.limit], 0
        kept = len(self.begin) if tokens[: len(self.begin)] == self.begin else 0
        if kept + over > first_read:
            raise Refused(
                "too_long", f"{problem}, and truncating on the left would remove position {first_read}, which is read"
            )
        return [*tokens[:kept], *tokens[kept + over :]], over

    def answer(self, messages: Sequence[Message]) -> str:
        """The content of the last message, which must be the assistant's; empty if it has only tool calls."""
        last = messages[-1] if messages and isinstance(messages[-1], Mapping) else {}
        content = last.get("content")
        if content is None and has_tool_calls(last):
            content = ""
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise Refused("bad_messages", "messages must end with the assistant's answer, whose content is text")
        if len(messages) < 2:
            raise Refused("bad_messages", "messages has only the assistant's answer; add the messages before it")
        return content

    def _encode_prompt(self, text: str) -> tuple[int, ...]:
        return (*self.begin, *self.content(text))

    def _kept(self, key: str) -> array[int] | None:
        with self._openings_lock:
            if key in self._openings:
                self._openings.move_to_end(key)
            return self._openings.get(key)

    def _keep(self, key: str, ids: Sequence[int]) -> array[int]:
        with self._openings_lock:
            self._openings[key] = array("i", ids)
            if len(self._openings) > OPENINGS_KEPT:
                self._openings.popitem(last=False)
            return self._openings[key]

    def templated(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:  # fmt: skip
        """The messages rendered with the model's chat template and its variables."""
        if not self.tokenizer.chat_template:
            raise Refused(
                "unsupported_form", f"{self.facts.name} has no chat template; give prompt and response as text"
            )
        try:
            return render_chat(
                self.tokenizer, messages, add_generation_prompt, continue_final_message=continue_final_message,
                variables=variables,
            )  # fmt: skip
        except PlauditError as error:
            raise Refused("bad_messages", str(error)) from error
        except RecursionError as error:
            raise Refused("bad_messages", "a message is nested too deeply") from error


def _size(item: Item) -> int:
    """In characters, or in tokens if the item has only tokens."""
    if item.tokens is not None:
        return len(item.tokens)
    if item.messages is not None:
        return len(_as_json(item.messages))
    prompt = item.prompt if item.prompt is None or isinstance(item.prompt, str) else _as_json(item.prompt)
    response = item.response if isinstance(item.response, tuple) else (item.response or "",)
    return len(item.text or "") + len(prompt or "") + sum(len(str(step)) for step in response)


def characters(messages: Sequence[Message]) -> int:
    """The size of a conversation, estimated before tokenising."""
    return len(_as_json(messages))


def has_tool_calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _as_json(messages: Sequence[Message]) -> str:
    try:
        return json.dumps([dict(message) for message in messages], allow_nan=False)
    except RecursionError as error:
        raise Refused("bad_messages", "a message is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise Refused("bad_messages", f"messages must be objects of text, numbers and lists: {error}") from error


class OutcomeReading:
    """One score for a response. With `each_label` a head with several labels needs no weights: the result has a score
    for every label and no overall score."""

    def __init__(
        self, table: OutcomeTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo, *, each_label: bool = False
    ) -> None:
        if facts.causal:
            raise ModelError(
                f"{facts.name} is a causal LM, which has no score; use a ...ForSequenceClassification model, "
                'or kind = "process" with the format it was trained with'
            )
        self.table = table
        self.facts = facts
        self.apart = table.answer == "apart"
        self.end = tokenizer.eos_token_id
        if table.end and self.end is None:
            raise ConfigError(f"end = true, but the tokenizer of {facts.name} has no EOS token; set end = false")
        self.intake = Intake(tokenizer, facts, table.max_tokens)
        self.weights = None if each_label and _unweighted(table, facts) else _weights(table, facts)
        self.bias = _by_label("bias", table.bias or {}, facts)

    def prepare(self, item: Item) -> Work:
        self.intake.refuse_huge(item)
        tokens = self._tokens(item)
        if not tokens:
            raise Refused("empty", "the item has no tokens; expected at least one")
        over = len(tokens) - self.intake.limit
        ended = self.table.end and (item.prompt is not None or (item.messages is not None and self.apart))
        if over > 0 and item.truncate == "right":
            # Truncates the end of the response, but keeps the token at which the score is read.
            tokens = [*tokens[: self.intake.limit - 1], tokens[-1]] if ended else tokens[: self.intake.limit]
        else:
            tokens, _ = self.intake.cut(tokens, len(tokens) - 1, len(tokens) - 1, item.truncate)
        last = len(tokens) - 1
        positions = (last,) if self.table.pool == "last" else tuple(range(last + 1))
        return Work(tokens, positions, None, 0, over > 0)

    def prerender(self, items: Sequence[Item]) -> None:
        """Renders the conversations of items that `prepare` will be called with, in one batch."""
        chats = [item.messages[:-1] if item.messages is not None and self.apart else item.prompt for item in items]
        self.intake.prerender([chat for chat in chats if isinstance(chat, tuple)])

    def finish(self, work: Work, values: np.ndarray) -> Score:
        if not np.isfinite(values).all():
            error = ItemError("nonfinite_score", f"{self.facts.name} returned a score that is not finite")
            return Score(error=error, truncated=work.truncated, tokens=len(work.tokens))
        wide = values.astype(np.float64)
        pooled = (wide[0] if len(wide) == 1 else wide.mean(axis=0)) + self.bias
        labels = self.facts.labels
        attributes = dict(zip(labels, map(float, pooled), strict=True)) if len(labels) > 1 else {}
        if self.weights is None:
            error = ItemError("no_weights", _say_weights(self.facts))
            return Score(error=error, attributes=attributes, truncated=work.truncated, tokens=len(work.tokens))
        value = float(pooled @ self.weights)
        if self.table.standardise is not None:
            value = (value - self.table.standardise.mean) / self.table.standardise.std
        return Score(value, attributes=attributes, truncated=work.truncated, tokens=len(work.tokens))

    def _tokens(self, item: Item) -> list[int]:
        if item.tokens is not None:
            return self.intake.tokens(item.tokens)
        if item.text is not None:
            return self.intake.text(item.text)
        if item.messages is not None:
            answer = self.intake.answer(item.messages)
            if self.apart and not has_tool_calls(item.messages[-1]):  # which only the template can render
                return self._answered(self.intake.opening(item.messages[:-1]), answer)
            return self.intake.conversation(item.messages)
        assert item.prompt is not None
        assert item.response is not None
        opening = self.intake.prompt(item.prompt) if isinstance(item.prompt, str) else self.intake.opening(item.prompt)
        response = item.response if isinstance(item.response, str) else joined(item.response)
        return self._answered(opening, response)

    def _answered(self, opening: list[int], response: str) -> list[int]:
        if response == "" and not self.table.end:
            raise Refused("empty", "the response is empty, and with end = false it has no token to read")
        return [*opening, *self.intake.content(response), *([self.end] if self.table.end else [])]


def joined(steps: tuple[str, ...]) -> str:
    if not all(isinstance(step, str) for step in steps):
        raise Refused("bad_steps", "each step must be text")
    return "".join(steps)


def _unweighted(table: OutcomeTable, facts: ModelInfo) -> bool:
    return table.weights is None and len(facts.labels) > 1


def _say_weights(facts: ModelInfo) -> str:
    return (
        f"{facts.name} scores {len(facts.labels)} labels ({', '.join(facts.labels[:8])}); "
        "set the weight of each, for example weights = { " + f'"{facts.labels[0]}" = 1.0 ' + "}"
    )


def _weights(table: OutcomeTable, facts: ModelInfo) -> np.ndarray:
    if _unweighted(table, facts):
        raise ConfigError(_say_weights(facts))
    if table.weights is None:
        return np.ones(1)
    return _by_label("weights", table.weights, facts)


def _by_label(key: str, numbers: Mapping[str, float], facts: ModelInfo) -> np.ndarray:
    for name in numbers:
        if name not in facts.labels:
            lacks = f"{key} has the label {name!r}, which {facts.name} does not have"
            raise ConfigError(f"{lacks}; {nearest(name, facts.labels)}")
    return np.array([numbers.get(label, 0.0) for label in facts.labels])


class LogprobsReading:
    """Reads log-probs of a causal LM."""

    def __init__(self, table: LogprobsTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        if not facts.causal:
            raise ModelError(
                f"{facts.name} has no language model head, so no log-probs; serve it as an outcome or process model"
            )
        self.facts = facts
        self.intake = Intake(tokenizer, facts, table.max_tokens)


class EmbeddingReading:
    """Reads vectors of a sentence encoder."""

    def __init__(self, table: EmbeddingTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        self.facts = facts
        self.intake = Intake(tokenizer, facts, table.max_tokens)

    @staticmethod
    def work(tokens: Sequence[int]) -> Work:
        return Work(list(tokens), (0,), None, steps=0, truncated=False)
