"""What a step adds to the text of its path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

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


def decodes_apart(tokenizer: Any) -> bool:
    """Whether the text of two runs of tokens is that of the first and that of the second, if the first ends with a
    whole character: true of what puts the bytes or the texts of tokens end to end, and changes nothing after that."""
    base = PreTrainedTokenizerFast
    if not isinstance(tokenizer, base) or tokenizer.clean_up_tokenization_spaces:
        return False
    if type(tokenizer).decode is not base.decode or type(tokenizer)._decode is not base._decode:
        return False
    return isinstance(tokenizer.backend_tokenizer.decoder, decoders.Fuse | decoders.ByteLevel)
