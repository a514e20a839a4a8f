"""Prepares the input of an encoder with a classification head: a text, or a pair of prompt and response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from plaudit.config.reward import OutcomeTable
from plaudit.errors import ConfigError, Refused, RequestError
from plaudit.models.text import codec_of, refuse_surrogates
from plaudit.records import Item
from plaudit.reward.pairs import Cut, fitted
from plaudit.reward.reading import OutcomeReading, joined
from plaudit.reward.work import ModelInfo, TypedTokens, Work


class EncoderReading(OutcomeReading):
    def __init__(
        self, table: OutcomeTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo, *, each_label: bool = False
    ) -> None:
        if table.pool != "last":
            raise ConfigError(
                f'pool = "{table.pool}", but {facts.name} is an encoder, whose head does the pooling; remove it'
            )
        super().__init__(table.model_copy(update={"end": False}), tokenizer, facts, each_label=each_label)

    def prepare(self, item: Item) -> Work:
        self.intake.refuse_huge(item)
        limit = self.intake.limit
        whole = self._written(item, Cut())
        if len(whole) > limit and item.truncate is None:
            self.intake.cut(whole, 0, 0, None)  # raises Refused
        tokens = whole if len(whole) <= limit else self._written(item, Cut(limit, item.truncate or "right"))
        return Work(tokens, (0,), None, 0, len(whole) > limit, types=tokens.types)

    def prerender(self, items: Sequence[Item]) -> None:
        """Does nothing: encoders have no chat template."""

    def _written(self, item: Item, cut: Cut) -> TypedTokens:
        if item.tokens is not None:
            ids = self.intake.tokens(item.tokens)
            return fitted(ids, None, [0] * len(ids), cut)
        if item.text is not None:
            if item.text == "":
                raise Refused("empty", "the text is empty; expected at least one character")
            return self._rendered(item.text, cut)
        if item.messages is not None:
            return self._literal((_question(item.messages[:-1]), self.intake.answer(item.messages)), cut)
        assert item.prompt is not None
        assert item.response is not None
        prompt = item.prompt if isinstance(item.prompt, str) else _question(item.prompt)
        return self._literal((prompt, item.response if isinstance(item.response, str) else joined(item.response)), cut)

    def _rendered(self, text: str, cut: Cut) -> TypedTokens:
        """Tokenises a rendered text: control strings become control tokens, and the tokenizer adds its special
        tokens."""
        return fitted(*self.intake.encoding(text), cut)

    def _literal(self, texts: tuple[str, str], cut: Cut) -> TypedTokens:
        """Tokenises plain texts: the tokenizer adds its special tokens, but control strings in the texts are plain
        text."""
        codec = codec_of(self.intake.tokenizer)
        try:
            refuse_surrogates("".join(texts))
        except RequestError as error:
            raise Refused("bad_text", str(error)) from error
        (encoding,) = codec.backend.encode_batch([texts], add_special_tokens=True)
        parts = encoding.sequence_ids
        inside = {token for token, part in zip(encoding.ids, parts, strict=True) if part is not None}
        if posing := codec.forbidden & inside:
            name = codec.controls[min(posing)]
            raise Refused("bad_text", f"the text contains the control token {name!r}; remove it")
        return fitted(encoding.ids, encoding.type_ids if self.facts.typed else None, parts, cut)


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The question before the answer. An encoder reads two texts, so only one message is allowed."""
    content = messages[0].get("content") if len(messages) == 1 else None
    if not isinstance(content, str):
        raise Refused(
            "unsupported_form", f"{len(messages)} messages before the answer, but an encoder reads one question and "
            "one answer: send one text message before the answer, or prompt and response",
        )  # fmt: skip
    return content


def outcome_reading(
    table: OutcomeTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo, *, each_label: bool = False
) -> OutcomeReading:
    kind = EncoderReading if facts.encoder else OutcomeReading
    return kind(table, tokenizer, facts, each_label=each_label)
