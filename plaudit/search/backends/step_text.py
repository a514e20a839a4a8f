"""Decodes the text that a step adds to its path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from plaudit.core.text import INCOMPLETE
from plaudit.models.text import decodes_apart

TEXTS_KEPT = 1 << 13  # siblings repeat each other, and so do the steps of one question


class StepText:
    """Decodes a step alone if the tokenizer's decoding does not depend on preceding tokens, otherwise together with
    the whole path."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._alone = lru_cache(maxsize=TEXTS_KEPT)(self._decode_alone) if decodes_apart(tokenizer) else None

    def __call__(self, response_ids: Sequence[int], text: str, tokens: tuple[int, ...]) -> str:
        """The text that these tokens add to `text`, the text of the previous steps."""
        if self._alone is not None and INCOMPLETE not in text:
            return self._alone(tokens)
        whole: str = self.tokenizer.decode([*response_ids, *tokens], skip_special_tokens=True)
        return whole[len(text) :] if whole.startswith(text) else str(self.tokenizer.decode(tokens))

    def _decode_alone(self, tokens: tuple[int, ...]) -> str:
        text: str = self.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
        return text
