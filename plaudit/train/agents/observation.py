"""Tokenises observations. Their text never becomes control tokens; those of the chat template do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from plaudit.errors import ConfigError
from plaudit.models import encode, render_chats

Role = Literal["user", "tool"]
ASKED, SAID = "a", "b"  # a placeholder conversation: what follows a turn does not depend on it


class ObservationEncoder:
    """In a conversation the observation is the next message, with all that the template puts between the policy's turn
    and its next one; otherwise it is plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: set[str] = set()  # roles that the template writes

    def tokens(self, observation: str, *, chat: bool, last: int, role: Role = "user") -> tuple[int, ...]:
        """`last` is the policy's last token: an end-of-turn token that it wrote itself is not written again."""
        if not chat:
            if role != "user":
                raise ConfigError(
                    f"role = {role!r} is for conversations, and the prompt is plain text: set data.chat = true"
                )
            return tuple(encode(self.tokenizer, observation))
        return self.messages([{"role": role, "content": observation}], last=last)

    def messages(
        self, messages: Sequence[Mapping[str, Any]], *, last: int, variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """The tokens between the policy's turn and its next one, with these messages in between. `variables` are what
        the template reads besides messages."""
        for role in {str(message.get("role")) for message in messages} - self._known:
            one, other = (self._between([{"role": role, "content": text}], last, variables) for text in "12")
            if one == other:
                raise ConfigError(f"the model's chat template drops {role} messages: give them the role user")
            self._known.add(role)
        return self._between(messages, last, variables)

    def _between(
        self, messages: Sequence[Mapping[str, Any]], last: int, variables: Mapping[str, Any] | None
    ) -> tuple[int, ...]:
        before: list[Mapping[str, Any]] = [{"role": "user", "content": ASKED}]
        after = [*before, {"role": "assistant", "content": SAID}, *messages]
        head, whole = render_chats(self.tokenizer, [before, after], add_generation_prompt=True, variables=variables)
        head += encode(self.tokenizer, SAID)
        if whole[: len(head)] != head:
            raise ConfigError(
                "the model's chat template renders a finished turn differently from an open one, so a conversation "
                "cannot continue token by token: set data.chat = false and write the turns as plain text"
            )
        between = whole[len(head) :]
        return tuple(between[1:] if between[:1] == [last] else between)


def shortened(observation: str, most: int) -> str:
    """The truncated text, with a note for the policy of what is missing."""
    if len(observation) <= most:
        return observation
    return f"{observation[:most]}\n[cut: {most} of {len(observation)} characters]\n"
