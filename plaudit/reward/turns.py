"""What a chat template writes around the turns of a conversation in which every step is one."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from plaudit.errors import ConfigError
from plaudit.models import encode, render_text

CONTENTS = [f"StandsForTurn{name}Here" for name in ("A", "B", "C", "D", "E", "F")]


@dataclass(frozen=True, slots=True)
class Turns:
    """Token ids: `opening` USER `after_user` ASSISTANT `after_assistant` USER `after_user` ASSISTANT ..."""

    opening: list[int]
    after_user: list[int]
    after_assistant: list[int]


def read_turns(tokenizer: PreTrainedTokenizerFast, system: str | None) -> Turns:
    """Taken from a rendered conversation, so that a long one need not be rendered to find where its turns are."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(CONTENTS)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rest = render_text(tokenizer, messages)
    parts = []
    for content in CONTENTS:
        part, separator, rest = rest.partition(content)
        if not separator:
            raise ConfigError('format.chat = "turns": the chat template leaves out a turn of the conversation')
        parts.append(part)
    opening, after_user, after_assistant = parts[:3]
    if parts[3:] != [after_user, after_assistant, after_user] or not after_user:
        raise ConfigError('format.chat = "turns": the chat template writes later turns otherwise than the first')
    return Turns(*(encode(tokenizer, part, control=True) for part in (opening, after_user, after_assistant)))
