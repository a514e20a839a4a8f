"""Converts an item to tokens, and the values read by the model to a score. Needs no torch, as it runs in the HTTP
process; thread-safe.

`Intake` is shared by all readings. The readings of whole responses are here: one score of a sequence classifier, and
models without scores (log-probs of a causal LM, vectors of an encoder). Steps are in `process.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import EmbeddingTable, LogprobsTable, OutcomeTable
from plaudit.errors import ConfigError, ModelError, PlauditError, Refused, RequestError, nearest
from plaudit.models import bos_ids, encode, render_chat, render_chats
from plaudit.models.recent import RecentIds
from plaudit.models.text import refuse_surrogates
from plaudit.records import Item, ItemError, Score
from plaudit.reward.work import ModelInfo, Work

PROMPTS_KEPT = 64  # many responses to the same prompt arrive in a row
CHATS_KEPT = 1 << 23  # characters and tokens; a search sends the same conversations repeatedly, step by step
CHARACTERS_PER_TOKEN = 64  # far above any real text; a longer item is rejected before tokenising
Message = Mapping[str, Any]
Ending = Literal["opening", "answered", "cut"]
"""How a rendered conversation ends: with the assistant's generation prompt; as the template ends it after the last
message; or behind the content of the last message."""


class Intake:
    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo, max_tokens: int | None, bos: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.facts = facts
        self.limit = min(facts.max_positions, max_tokens or facts.max_positions)
        self.way = facts.way_to_more if self.limit == facts.max_positions else ""
        self.most_characters = CHARACTERS_PER_TOKEN * self.limit
        self.added = bos_ids(tokenizer)
        self.begin = self.added
        if bos and not self.begin:
            if tokenizer.bos_token_id is None:
                raise ModelError(
                    f"the tokenizer of {facts.name} has no BOS token, but the format needs one; set it "
                    "in the tokenizer's config"
                )
            self.begin = [tokenizer.bos_token_id]
        self._prompt = lru_cache(maxsize=PROMPTS_KEPT)(self._encode_prompt)
        self._chats = RecentIds(CHATS_KEPT)

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
        return self._chat(messages, "opening")

    def conversation(self, messages: Sequence[Message], cut: bool = False) -> list[int]:
        """The rendered conversation as transformers renders it. `cut`: up to the content of the last message."""
        return self._chat(messages, "cut" if cut else "answered")

    def prerender(self, chats: Sequence[tuple[Sequence[Message], Ending]]) -> None:
        """Renders conversations in a batch for each ending, which saves round trips to the template's process."""
        for ending in dict.fromkeys(ending for _, ending in chats):
            with suppress(PlauditError, RecursionError):  # errors are reported when the conversation is requested
                wanted = {ending + _as_json(messages): messages for messages, each in chats if each == ending}
                fit = [key for key in wanted if len(key) <= self.most_characters]
                known = self._chats.get_all(fit)
                if new := [key for key in fit if key not in known]:
                    rendered = render_chats(self.tokenizer, [wanted[key] for key in new], **_rendering(ending))
                    self._chats.put_all(dict(zip(new, rendered, strict=True)))

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
        tokenizer adds its special tokens. The BOS token is not duplicated."""
        self.refuse_huge(Item(text=text))
        return self.encoding(text, special=special)[0]

    def encoding(
        self, text: str, pair: str | None = None, special: bool = True
    ) -> tuple[list[int], list[int] | None, list[int | None]]:
        """The same for a text or a pair of any length: the tokens, their types if the model has them, and the text
        that each belongs to: 0, 1, or None for a special token that the tokenizer added."""
        self.refuse_surrogates(text + (pair or ""))
        typed = self.facts.typed
        encoding = self.tokenizer(text, pair, add_special_tokens=special, return_token_type_ids=typed)
        ids, parts = encoding["input_ids"], encoding.sequence_ids()
        types = encoding["token_type_ids"] if typed else None
        added = self.added if special else []
        for part in (0,) if pair is None else (1, 0):
            at = parts.index(part) if added and part in parts else 0
            if at and ids[at - len(added) : at] == added == ids[at : at + len(added)]:
                for each in (ids, parts, types or []):
                    del each[at : at + len(added)]
        return ids, types, parts

    def refuse_surrogates(self, text: str) -> None:
        try:
            refuse_surrogates(text)
        except RequestError as error:
            raise Refused("bad_text", str(error)) from error

    def tokens(self, ids: Sequence[Any]) -> list[int]:
        if not ids:
            raise Refused("empty", "the list of tokens is empty; expected at least one")
        size = self.facts.vocab_size
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size:
            return list(ids)
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

    def _chat(self, messages: Sequence[Message], ending: Ending) -> list[int]:
        key = ending + _as_json(messages)
        if (known := self._chats.get(key)) is not None:
            return known
        tokens = self._rendered(messages, **_rendering(ending))
        self._chats.put_all({key: tokens})
        return tokens

    def templated(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The messages rendered with the model's chat template and its variables."""
        return self._rendered(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def _rendered(self, messages: Sequence[Message], **rendering: Any) -> list[int]:
        if not self.tokenizer.chat_template:
            raise Refused(
                "unsupported_form", f"{self.facts.name} has no chat template; give prompt and response as text"
            )
        try:
            return render_chat(self.tokenizer, messages, **rendering)
        except PlauditError as error:
            raise Refused("bad_messages", str(error)) from error
        except RecursionError as error:
            raise Refused("bad_messages", "a message is nested too deeply") from error


def _rendering(ending: Ending) -> dict[str, Any]:
    return {"add_generation_prompt": ending == "opening", "continue_final_message": ending == "cut"}


def _size(item: Item) -> int:
    """In characters, or in tokens if the item has only tokens."""
    if item.tokens is not None:
        return len(item.tokens)
    if item.messages is not None:
        return characters(item.messages)
    prompt = characters(item.prompt) if isinstance(item.prompt, tuple) else len(item.prompt or "")
    response = item.response if isinstance(item.response, tuple) else (item.response or "",)
    return len(item.text or "") + prompt + sum(len(str(step)) for step in response)


def characters(messages: Sequence[Message]) -> int:
    """The size of a conversation, estimated before tokenising."""
    if not all(isinstance(message, Mapping) for message in messages):
        return len(_as_json(messages))
    values = [value for message in messages for value in message.values()]
    others = [{"": value} for value in values if not isinstance(value, str)]
    return sum(len(value) for value in values if isinstance(value, str)) + (len(_as_json(others)) if others else 0)


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
        self._scale: float | None = None  # of a single label
        if self.weights is not None and len(facts.labels) == 1:
            self._shift, self._scale = float(self.bias[0]), float(self.weights[0])

    def prepare(self, item: Item) -> Work:
        self.intake.refuse_huge(item)
        tokens = self._tokens(item)
        if not tokens:
            raise Refused("empty", "the item has no tokens; expected at least one")
        over = len(tokens) - self.intake.limit
        if over > 0 and item.truncate == "right":
            # Truncates the end of the response, but keeps the end, at which the score is read.
            end = self._end_of(item, tokens)
            tokens = [*tokens[: self.intake.limit - len(end)], *end]
        else:
            tokens, _ = self.intake.cut(tokens, len(tokens) - 1, len(tokens) - 1, item.truncate)
        last = len(tokens) - 1
        positions = (last,) if self.table.pool == "last" else tuple(range(last + 1))
        return Work(tokens, positions, None, 0, over > 0)

    def prerender(self, items: Sequence[Item]) -> None:
        """Renders the conversations of items that `prepare` will be called with, in one batch."""
        chats: list[tuple[Sequence[Message], Ending]] = []
        for item in items:
            with suppress(Refused):  # reported by `prepare`
                messages = self._messages(item)
                if messages is not None and self._apart(messages):
                    chats.append((messages[:-1], "opening"))
                elif messages is not None:
                    chats.append((messages, "cut" if item.cut else "answered"))
        self.intake.prerender(chats)

    def finish(self, work: Work, values: np.ndarray) -> Score:
        if values.size == 1 and math.isfinite(number := values.item()) and self._scale is not None:
            # The most frequent case: what follows with one row and one label, without a dozen small arrays.
            value = (number + self._shift) * self._scale + 0.0  # a sum over labels begins with 0, so -0 becomes 0
            return Score(self._standardised(value), truncated=work.truncated, tokens=len(work.tokens))
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
        value = self._standardised(float(pooled @ self.weights))
        return Score(value, attributes=attributes, truncated=work.truncated, tokens=len(work.tokens))

    def _standardised(self, value: float) -> float:
        if self.table.standardise is None:
            return value
        return (value - self.table.standardise.mean) / self.table.standardise.std

    def conversation(self, messages: Sequence[Message], cut: bool = False) -> list[int]:
        """A conversation that ends with the assistant's answer, in whatever form it was sent."""
        answer = self.intake.answer(messages)
        if self._apart(messages):
            return self._answered(self.intake.opening(messages[:-1]), answer, cut)
        return self.intake.conversation(messages, cut)

    def _apart(self, messages: Sequence[Message]) -> bool:
        """Whether the answer follows the generation prompt. Only the template can render tool calls."""
        last = messages[-1] if messages else None
        return self.apart and isinstance(last, Mapping) and not has_tool_calls(last)

    def _messages(self, item: Item) -> tuple[Message, ...] | None:
        """The conversation of an item, if it is one."""
        if isinstance(item.prompt, tuple):
            return (*item.prompt, {"role": "assistant", "content": _response(item)})
        return item.messages

    def _tokens(self, item: Item) -> list[int]:
        if item.tokens is not None:
            return self.intake.tokens(item.tokens)
        if item.text is not None:
            return self.intake.text(item.text)
        if (messages := self._messages(item)) is not None:
            return self.conversation(messages, item.cut)
        assert isinstance(item.prompt, str)
        return self._answered(self.intake.prompt(item.prompt), _response(item), item.cut)

    def _answered(self, opening: list[int], response: str, cut: bool) -> list[int]:
        if response == "" and not self.table.end:
            raise Refused("empty", "the response is empty, and with end = false it has no token to read")
        return [*opening, *self.intake.content(response), *([self.end] if self.table.end and not cut else [])]

    def _end_of(self, item: Item, tokens: list[int]) -> list[int]:
        """The tokens behind the response: the end token, or what the template writes."""
        messages = self._messages(item)
        if item.cut or (messages is None and item.prompt is None):
            return []
        if messages is None or self._apart(messages):
            return tokens[-1:] if self.table.end else []
        with suppress(Refused):
            response = self.intake.conversation(messages, cut=True)
            if tokens[: len(response)] == response and len(tokens) - len(response) < self.intake.limit:
                return tokens[len(response) :]
        return []


def _response(item: Item) -> str:
    assert item.response is not None
    return item.response if isinstance(item.response, str) else joined(item.response)


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
