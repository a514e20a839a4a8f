"""Texts and messages to the token ids of a prompt, within the model's positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.config.prompting import AskingTable
from plaudit.errors import DataError, PlauditError
from plaudit.models import bos_ids, encode, render_chats
from plaudit.records import Prompt
from plaudit.train.data.rows import Row


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The model's positions, how many of them a response may take, by which key of the recipe, and what gives more."""

    positions: int
    response: int
    key: str = "sampling.max_tokens"
    way_to_more: str = ""

    def check(self, tokens: int) -> None:
        left = self.positions - self.response
        if tokens > left:
            raise DataError(
                f"the prompt has {tokens} tokens; the model has {self.positions} positions, of which "
                f"{self.key} = {self.response} are the response's: {self.positions} - {self.response} = "
                f"{left} are left; shorten the prompt or lower {self.key}{self.way_to_more}"
            )


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A text or messages on their way to a prompt. `origin` is where they came from, for messages."""

    content: str | Sequence[dict[str, Any]]
    truth: Any
    origin: str
    extra: dict[str, Any] = field(default_factory=dict)
    truth_key: str = "truth"


class PromptEncoder:
    """The tokens of prompts as the policy was trained on them: their text never becomes control tokens."""

    def __init__(self, data: AskingTable, tokenizer: Any, room: LengthLimits | None = None) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.room = room

    def rows(self, rows: Sequence[Row], truth: str) -> list[Prompt]:
        """Of a data file; `truth` is the key of what is needed to check an answer, and other keys ride along."""
        return self.prompts([_raw_prompt(row, truth) for row in rows])

    def prompts(self, raw: Sequence[RawPrompt]) -> list[Prompt]:
        """Chats are rendered together: a way to the process that does it and back for each would take longer."""
        chats = [self._chat(each) for each in raw]
        pairs = list(zip(raw, chats, strict=True))
        rendered = iter(self._rendered([(each, chat) for each, chat in pairs if chat is not None]))
        begin = bos_ids(self.tokenizer) if None in chats else []
        encoded = []
        for each, chat in pairs:
            if chat is None:
                text, extra = str(each.content), each.extra
                ids = [*begin, *encode(self.tokenizer, text)]
            else:
                text, extra = "\n".join(str(message.get("content")) for message in chat), {"messages": tuple(chat)}
                ids, extra = next(rendered), {**each.extra, **extra}
            self._check(ids, each.origin)
            encoded.append(Prompt(text, tuple(ids), each.truth, extra, each.truth_key))
        return encoded

    def _chat(self, raw: RawPrompt) -> list[dict[str, Any]] | None:
        """Its messages, or None for a text that is not asked in a chat. data.system goes before messages that have no
        system message of their own."""
        if not isinstance(raw.content, str):
            messages = list(raw.content)
        elif self.data.chat:
            pairs = [zip(("user", "assistant"), shot, strict=True) for shot in self.data.shots]
            messages = [{"role": role, "content": content} for pair in pairs for role, content in pair]
            messages.append({"role": "user", "content": raw.content})
        else:
            return None
        if self.data.system is not None and messages and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.data.system}, *messages]
        return messages

    def _rendered(self, chats: Sequence[tuple[RawPrompt, list[dict[str, Any]]]]) -> list[list[int]]:
        if not chats:
            return []  # of a model that may have no template
        try:
            return render_chats(self.tokenizer, [chat for _, chat in chats], add_generation_prompt=True)
        except PlauditError as error:
            if len(chats) == 1:
                raise DataError(f"{chats[0][0].origin}: {error}") from None
        return [ids for each in chats for ids in self._rendered([each])]  # which says whose fault it is

    def may_be_too_long(self, row: Row) -> bool:
        """False is sure without a tokenizer: a token is at least a byte, and a template under half the positions."""
        if self.room is None:
            return False
        messages = row.fields.get("messages")
        text = f"{self.data.system or ''}{self.data.shots}{row.fields.get('prompt') if messages is None else messages}"
        around = self.room.positions // 2 if self.data.chat or messages is not None else len(bos_ids(self.tokenizer))
        return len(text.encode(errors="replace")) + around > self.room.positions - self.room.response

    def _check(self, ids: list[int], origin: str) -> None:
        if not ids:
            raise DataError(f"{origin}: the prompt is empty, and the model has no begin token to stand for it")
        try:
            if self.room is not None:
                self.room.check(len(ids))
        except DataError as error:
            raise DataError(f"{origin}: {error}") from None


def _raw_prompt(row: Row, truth: str) -> RawPrompt:
    extra = {key: value for key, value in row.fields.items() if key not in ("prompt", "messages", truth)}
    content = row.text("prompt") if row.fields.get("messages") is None else messages_of(row)
    return RawPrompt(content, row.fields.get(truth), row.origin, extra, truth)


def messages_of(row: Row) -> list[dict[str, Any]]:
    messages = row.fields["messages"]
    if not isinstance(messages, list | tuple) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise DataError(f"{row.origin}: messages must be a list of {{role, content}}, found {str(messages)[:60]!r}")
    return [dict(message) for message in messages]
