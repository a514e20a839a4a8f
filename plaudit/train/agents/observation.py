"""The tokens of what an environment says. Its text never becomes control tokens; a chat template's own do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.errors import ConfigError
from plaudit.models import encode, render_chats

ASKED, SAID = "a", "b"  # stand for a conversation so far: what follows a turn does not depend on it


class ObservationEncoder:
    """In a conversation the observation is the user's next message, with all that the template puts between the
    policy's turn and its next one; elsewhere it is plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def tokens(self, observation: str, *, chat: bool, last: int) -> tuple[int, ...]:
        """`last` is the policy's last token: an end-of-turn token that it wrote itself is not written again."""
        if not chat:
            return tuple(encode(self.tokenizer, observation))
        return self.messages([{"role": "user", "content": observation}], last=last)

    def messages(
        self, messages: Sequence[Mapping[str, Any]], *, last: int, variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """All that stands between the policy's turn and its next one, where these messages come in between.
        `variables` are what the template looks at beside messages."""
        before: list[Mapping[str, Any]] = [{"role": "user", "content": ASKED}]
        after = [*before, {"role": "assistant", "content": SAID}, *messages]
        head, whole = render_chats(self.tokenizer, [before, after], add_generation_prompt=True, variables=variables)
        head += encode(self.tokenizer, SAID)
        if whole[: len(head)] != head:
            raise ConfigError(
                "the model's chat template writes a finished turn otherwise than one that is being written, so that a "
                "conversation cannot go on token by token: set data.chat = false and write the turns as plain text"
            )
        between = whole[len(head) :]
        return tuple(between[1:] if between[:1] == [last] else between)
