"""Encodes texts and messages to prompt token ids, within the model's positions."""

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
    """The model's positions, the response's limit and its recipe key, and how to extend the positions."""

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
    """A text or messages before encoding. `origin` is their source, for error messages."""

    content: str | Sequence[dict[str, Any]]
    truth: Any
    origin: str
    extra: dict[str, Any] = field(default_factory=dict)
    truth_key: str = "truth"


class PromptEncoder:
    """Encodes prompts as in the policy's training: text never becomes control tokens."""

    def __init__(self, data: AskingTable, tokenizer: Any, room: LengthLimits | None = None) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.room = room

    def rows(self, rows: Sequence[Row], truth: str) -> list[Prompt]:
        """Encode the rows of a data file; `truth` is the key of the reference answer, and other keys are kept."""
        return self.prompts([_raw_prompt(row, truth) for row in rows])

    def prompts(self, raw: Sequence[RawPrompt]) -> list[Prompt]:
        """Encode prompts. Chats are rendered in one call to the template process, which is faster."""
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
        """Return the messages, or None for a plain text without chat. data.system is prepended if there is no system
        message."""
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
            return []  # the model may have no template
        try:
            return render_chats(self.tokenizer, [chat for _, chat in chats], add_generation_prompt=True)
        except PlauditError as error:
            if len(chats) == 1:
                raise DataError(f"{chats[0][0].origin}: {error}") from None
        return [ids for each in chats for ids in self._rendered([each])]  # to name the prompt that fails

    def may_be_too_long(self, row: Row) -> bool:
        """Check without a tokenizer; False is certain: a token is at least a byte, a template under half the
        positions."""
        if self.room is None:
            return False
        messages = row.fields.get("messages")
        text = f"{self.data.system or ''}{self.data.shots}{row.fields.get('prompt') if messages is None else messages}"
        around = self.room.positions // 2 if self.data.chat or messages is not None else len(bos_ids(self.tokenizer))
        return len(text.encode(errors="replace")) + around > self.room.positions - self.room.response

    def _check(self, ids: list[int], origin: str) -> None:
        if not ids:
            raise DataError(
                f"{origin}: the prompt is empty, and the model has no BOS token to use instead; remove the row"
            )
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
        raise DataError(f"{row.origin}: messages must be a list of {{role, content}}, got {str(messages)[:60]!r}")
    return [dict(message) for message in messages]
