"""Checking stop strings by token ids ends a sample at the same token as checking the text after every token."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from plaudit.core.text import MOST_STOP_TOKENS, StopTokens, TextStream
from plaudit.models import load_tokenizer
from tests.models.builders import byte_tokenizer
from tests.reward.tiny import sentence_piece


def by_text(tokenizer: Any, stops: Sequence[str], tokens: Sequence[int]) -> int | None:
    stream = TextStream(tokenizer, stops, 0)
    return next((i for i, token in enumerate(tokens) if stream.push(token)), None)


def by_ids(stop: StopTokens, tokens: Sequence[int]) -> int | None:
    assert stop.ids is not None
    candidates = (i for i, token in enumerate(tokens) if token in stop.ids)
    return next((i for i in candidates if stop.complete(tokens[: i + 1])), None)


@pytest.mark.parametrize(
    "stops", [("\n\n",), ("\nh", "ello\n"), ("ß",), ("€;", "lhe"), ("\n",), ("<|im_end|>",), ("hellohe\n",)]
)
def test_token_id_check_stops_at_the_same_token_as_the_text_check(stops: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    stop, rng, stopped = StopTokens(tokenizer, stops), random.Random(str(stops)), 0
    letters = tokenizer.encode("\n\nhello\nh ß€;hel lhe", add_special_tokens=False)
    partial_characters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ß€"]
    merged = range(256, len(tokenizer))
    for _ in range(400):
        tokens = rng.choices([*letters, *merged, *partial_characters], k=40)
        assert by_ids(stop, tokens) == by_text(tokenizer, stops, tokens)
        stopped += by_ids(stop, tokens) is not None
    # A control token has no text, so it never ends a sample; seven given characters are rare in random tokens.
    assert stopped == 0 if stops == ("<|im_end|>",) else stopped > (0 if len(stops[0]) > 6 else 50)


def test_only_tokens_that_can_complete_the_string_are_listed() -> None:
    tokenizer = load_tokenizer("sums-policy")
    vocabulary = tokenizer.get_vocab()
    assert StopTokens(tokenizer, (";",)).ids == {vocabulary[";"]}
    assert StopTokens(tokenizer, ("=1", "9;")).ids == {vocabulary["1"], vocabulary[";"]}


def words(count: int, end: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({f"w{i}{end}": i for i in range(count)} | {"?": count}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_no_list_for_non_concatenating_decoders_or_too_many_tokens() -> None:
    assert StopTokens(sentence_piece(), ("\n\n",)).ids is None
    assert StopTokens(words(MOST_STOP_TOKENS, ";"), (";",)).ids == frozenset(range(MOST_STOP_TOKENS))
    assert StopTokens(words(MOST_STOP_TOKENS + 1, ";"), (";",)).ids is None


def test_no_list_if_a_token_completes_the_string_and_starts_a_character() -> None:
    backend = byte_tokenizer().backend_tokenizer
    alphabet = {piece: i for i, piece in enumerate([*"ĊĠab", "ĊĊâ"])}
    model_tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    model_tokenizer.decoder = backend.decoder
    assert StopTokens(PreTrainedTokenizerFast(tokenizer_object=model_tokenizer), ("\n\n",)).ids is None
    assert StopTokens(PreTrainedTokenizerFast(tokenizer_object=model_tokenizer), ("a b",)).ids == {alphabet["b"]}
