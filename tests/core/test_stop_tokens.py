"""Stop strings checked by token ids end a sample at the same token as checking the text after every token."""

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
    paused = (i for i, token in enumerate(tokens) if token in stop.ids)
    return next((i for i in paused if stop.complete(tokens[: i + 1])), None)


@pytest.mark.parametrize(
    "stops", [("\n\n",), ("\nh", "ello\n"), ("ß",), ("€;", "lhe"), ("\n",), ("<|im_end|>",), ("hellohe\n",)]
)
def test_a_sample_of_any_tokens_ends_at_the_same_token(stops: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    stop, rng, ended = StopTokens(tokenizer, stops), random.Random(str(stops)), 0
    letters = tokenizer.encode("\n\nhello\nh ß€;hel lhe", add_special_tokens=False)
    halves = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ß€"]
    merged = range(256, len(tokenizer))
    for _ in range(400):
        tokens = rng.choices([*letters, *merged, *halves], k=40)
        assert by_ids(stop, tokens) == by_text(tokenizer, stops, tokens)
        ended += by_ids(stop, tokens) is not None
    # A control token has no text, so that nothing ends there.
    assert (ended > 50) == (stops != ("<|im_end|>",)) or len(stops[0]) > 6


def test_only_tokens_that_can_complete_the_string_are_listed() -> None:
    tokenizer = load_tokenizer("sums-policy")
    vocabulary = tokenizer.get_vocab()
    assert StopTokens(tokenizer, (";",)).ids == {vocabulary[";"]}
    assert StopTokens(tokenizer, ("=1", "9;")).ids == {vocabulary["1"], vocabulary[";"]}


def words(count: int, end: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({f"w{i}{end}": i for i in range(count)} | {"?": count}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_there_is_no_list_where_text_is_not_put_end_to_end_or_too_much_would_be_listed() -> None:
    assert StopTokens(sentence_piece(), ("\n\n",)).ids is None
    assert StopTokens(words(MOST_STOP_TOKENS, ";"), (";",)).ids == frozenset(range(MOST_STOP_TOKENS))
    assert StopTokens(words(MOST_STOP_TOKENS + 1, ";"), (";",)).ids is None


def test_there_is_no_list_where_a_token_completes_the_string_and_begins_a_character() -> None:
    backend = byte_tokenizer().backend_tokenizer
    alphabet = {piece: i for i, piece in enumerate([*"ĊĠab", "ĊĊâ"])}
    cut = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    cut.decoder = backend.decoder
    assert StopTokens(PreTrainedTokenizerFast(tokenizer_object=cut), ("\n\n",)).ids is None
    assert StopTokens(PreTrainedTokenizerFast(tokenizer_object=cut), ("a b",)).ids == {alphabet["b"]}
