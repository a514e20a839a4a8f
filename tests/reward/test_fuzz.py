"""For any input, a format either rejects it with a typed error or gives exactly one position per step."""

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit.errors import Refused
from plaudit.records import Item
from plaudit.reward import Work

from .test_outcome import reading as outcome_reading
from .test_process import READINGS

TYPES = {"too_long", "empty", "bad_text", "bad_tokens", "bad_messages", "bad_steps", "no_steps", "unsupported_form"}
FRAGMENTS = [
    "<extra_0>", "ки", " ки", "\n", "\n\n", "+", "-", ";", "<|im_end|>", "<|im_start|>", "</s>", "<|eot_id|>", "h",
    "he", "hello", " ", "\ud800", "\0", "é", "日本", "StandsForTurnAHere", "{step}", "{prompt}",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=6).map("".join)
CONTENT = st.one_of(TEXT, st.none(), st.integers(), st.lists(TEXT, max_size=2))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "wizard", "<|im_end|>"]), "content": CONTENT}
    ),
    max_size=4,
).map(tuple)
TOKENS = st.lists(st.one_of(st.integers(-2, 400), st.booleans(), st.floats(), st.none()), max_size=20).map(tuple)
SIDES = st.sampled_from([None, "left", "right"])
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def items(draw: st.DrawFn) -> Item:
    side: Any = draw(SIDES)
    match draw(st.integers(0, 3)):
        case 0:
            prompt = draw(st.one_of(TEXT, MESSAGES))
            return Item(prompt=prompt, response=draw(st.one_of(TEXT, st.lists(TEXT).map(tuple))), truncate=side)
        case 1:
            return Item(messages=draw(MESSAGES), truncate=side)
        case 2:
            return Item(text=draw(TEXT), truncate=side)
        case _:
            return Item(tokens=draw(TOKENS), truncate=side)


@cache
def readings() -> list[Any]:
    all_readings = [
        *(make() for make in READINGS.values()),
        outcome_reading(),
        outcome_reading(answer="apart", pool="mean"),
    ]
    for reading in all_readings:
        reading.intake.limit = 24
    return all_readings


def prepared(reading: Any, item: Item) -> Work | Refused:
    try:
        return reading.prepare(item)  # type: ignore[no-any-return]
    except Refused as error:
        return error


@pytest.mark.slow
@FUZZ
@given(items())
def test_item_is_rejected_or_gets_one_position_per_step(item: Item) -> None:
    for reading in readings():
        work = prepared(reading, item)
        if isinstance(work, Refused):
            assert work.type in TYPES
            assert len(str(work)) < 400
            continue
        assert 0 < len(work.tokens) <= 24
        assert all(type(token) is int and 0 <= token < reading.facts.vocab_size for token in work.tokens)
        assert list(work.positions) == sorted(set(work.positions))
        assert 0 <= work.positions[0] <= work.positions[-1] < len(work.tokens)
        if work.steps:
            assert len(work.positions) == work.steps
            if isinstance(item.response, tuple):
                assert work.steps == len(item.response)
