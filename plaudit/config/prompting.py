"""What a model is asked, and how: keys that RL and search have in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from plaudit.config.table import Table


class AskingTable(Table):
    gym: str | None = None
    """The name of a reasoning-gym task (extra `verify`)."""
    gym_options: Mapping[str, Any] = {}
    """gym: the task's own settings, such as max_value."""
    chat: bool = False
    """A plain prompt becomes the user's message in the model's chat template."""
    system: str | None = None
    """With chat: the system message before it."""
    shots: tuple[tuple[str, str], ...] = ()
    """With chat: questions and answers before it, as turns of the conversation, for a model that needs to be shown."""

    @model_validator(mode="after")
    def _in_a_chat(self) -> Self:
        if self.system is not None and not self.chat:
            raise ValueError("system is the first message of a chat: set data.chat = true, or leave it out")
        if self.shots and not self.chat:
            raise ValueError("shots are turns of a chat: set data.chat = true, or leave them out")
        return self

    def without_meaning(self) -> set[str]:
        return {"gym_options"} if self.gym is None else set()
