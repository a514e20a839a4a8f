"""What a step adds to the text of its path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from plaudit.models.text import decodes_apart

TEXTS_KEPT = 1 << 13  # siblings repeat each other, and so do the steps of one question
HALF = "\ufffd"  # what a character decodes to of which tokens are missing


class StepText:
    """Decodes a step alone where a tokenizer decodes what is behind a beginning as it does without it, and with the
    whole path where that is not sure."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._alone = lru_cache(maxsize=TEXTS_KEPT)(self._decode_alone) if decodes_apart(tokenizer) else None

    def __call__(self, response_ids: Sequence[int], text: str, tokens: tuple[int, ...]) -> str:
        """The text that these tokens add to `text`, that of the steps before them."""
        if self._alone is not None and HALF not in text:
            return self._alone(tokens)
        whole: str = self.tokenizer.decode([*response_ids, *tokens], skip_special_tokens=True)
        return whole[len(text) :] if whole.startswith(text) else str(self.tokenizer.decode(tokens))

    def _decode_alone(self, tokens: tuple[int, ...]) -> str:
        text: str = self.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
        return text
