"""Incremental detokenization, and stop strings that span several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from plaudit.models.text import decodes_apart

INCOMPLETE = "\ufffd"  # what the bytes of an incomplete character decode to
MOST_STOP_TOKENS = 1024  # a decode step compares every row's token with all of them


class TextStream:
    """The text of one sample, in pieces. Text is withheld while its last character is incomplete, and while its end
    could be the beginning of a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], minimum: int, include: bool = False) -> None:
        """include   the text ends behind a stop string, not before it"""
        self._tokenizer = tokenizer
        self._stops = stops
        self._minimum = minimum
        self._include = include
        self.rewind(())

    def rewind(self, tokens: Sequence[int]) -> None:
        """Reset to the state after these tokens."""
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text is in `text`
        self._context = 0  # the token from which decoding starts, so that leading spaces are those of the whole text
        self.text = ""
        self.stop = ""
        """The stop string that ended the text."""
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> bool:
        """Add a token. True if a stop string is now complete; the text then ends there."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._settled])
        now = self._decode(self._tokens[self._context :])
        if now.endswith(INCOMPLETE) or len(now) <= len(before):
            return False
        start = len(self.text)
        self.text += now[len(before) :]
        self._context, self._settled = self._settled, len(self._tokens)
        return len(self._tokens) > self._minimum and self._find_stop(start)

    def _find_stop(self, start: int) -> bool:
        """Of several stop strings in the text of one token the one that ends first counts."""
        places = [(stop, self.text.find(stop, max(0, start - len(stop) + 1))) for stop in self._stops]
        found = [(at + len(stop), stop) for stop, at in places if at >= 0]
        if not found:
            return False
        end, self.stop = min(found, key=lambda each: each[0])
        self.text = self.text[: end if self._include else end - len(self.stop)]
        return True

    def piece(self, reported: int, *, last: bool) -> str:
        """The text after the first `reported` characters, as far as it can no longer change."""
        end = len(self.text)
        if not last and not self._include:
            end -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        return self.text[reported:end]

    def finish(self, reported: int) -> str:
        """The whole text, whose first `reported` characters are already sent; an incomplete last character stays as it
        decodes."""
        if not self.stop:
            whole = self._decode(self._tokens)
            self.text = whole if whole.startswith(self.text[:reported]) else self.text
        return self.text

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
        return text


class StopTokens:
    """The tokens that can complete a stop string, for decode loops that test only token ids: a sample pauses at one of
    them, and `complete` then checks its text. No other token can complete a stop string.

    ids   the tokens; None if they cannot be listed for this tokenizer, or if the list would be too long
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.ids = _completing(tokenizer, stops) if decodes_apart(tokenizer) else None

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens, all of one sample, contains a stop string."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in self._stops)


@lru_cache(maxsize=8)
def stop_tokens(tokenizer: Any, stops: tuple[str, ...]) -> StopTokens:
    """The cached StopTokens: computing them decodes the whole vocabulary."""
    return StopTokens(tokenizer, stops)


def _completing(tokenizer: Any, stops: tuple[str, ...]) -> frozenset[int] | None:
    """The tokens that contain a stop string or begin with a suffix of one. If a stop string is not ASCII, a token may
    also complete it with one byte of a character."""
    ends = tuple({stop[at:] for stop in stops for at in range(1, len(stop))})
    bytewise = not all(stop.isascii() for stop in stops)
    numbers = sorted(tokenizer.get_vocab().values())
    pieces = tokenizer.backend_tokenizer.decode_batch([[number] for number in numbers], skip_special_tokens=True)
    ids = set()
    for number, piece in zip(numbers, pieces, strict=True):
        if piece.startswith(ends) or any(stop in piece for stop in stops):
            if piece.endswith(INCOMPLETE):
                return None  # TextStream tests for stop strings once the character is complete, some tokens later
            ids.add(number)
        elif bytewise and INCOMPLETE in piece:
            ids.add(number)
    return frozenset(ids) if len(ids) <= MOST_STOP_TOKENS else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
