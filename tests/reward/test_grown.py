"""A response extended by a step: its incremental encoding equals an encoding from scratch."""

import random

import numpy as np
import pytest

from plaudit.errors import Refused
from plaudit.records import Item
from plaudit.reward import ProcessReading
from plaudit.reward.work import Work

from . import tiny
from .test_process import ALL, READINGS, reading
from .tiny import QUESTION, STEPS

BITS = ("a", " ", "\n", "\n\n", "1+2 = 3", "ß", "ки", "<extra_0>", "<|im_end|>", "\t", "x;", "")


def prepared(of: ProcessReading, steps: tuple[str, ...]) -> Work | None:
    try:
        return of.prepare(Item(prompt=QUESTION, response="".join(steps)))
    except Refused:
        return None


@ALL
def test_extended_encoding_equals_encoding_from_scratch(name: str) -> None:
    of, rng, grown_count = READINGS[name](), random.Random(name), 0
    split = of.format.split
    for _ in range(300):
        steps: tuple[str, ...] = ()
        before: Work | None = None
        for _ in range(4):
            pieces = rng.choices(BITS, k=rng.randrange(4))
            steps += ("".join(pieces) + rng.choice((split, split, split, "", split[:1], split[-1:])),)
            full = prepared(of, steps)
            if before is not None and (grown := of.grown(tuple(before.tokens), QUESTION, steps)) is not None:
                grown_count += 1
                assert full is not None
                assert (full.steps, full.truncated) == (len(steps), False)
                assert (grown.tokens, grown.positions, grown.columns) == (
                    full.tokens,
                    full.positions[-1:],
                    of.columns,
                )
            before = full if full is not None and full.steps == len(steps) else None
    form = of.format
    apart = not form.joined and of.turns is None and not (form.end and (form.strip or not form.keep))
    assert grown_count > 30 if apart else grown_count == 0


def test_extension_beyond_the_token_limit_is_encoded_from_scratch() -> None:
    of = reading({"split": "\n"}, tiny.chatml())
    steps = tuple(f"{step}\n" for step in STEPS)
    before = prepared(of, steps[:2])
    assert before is not None
    assert of.grown(before.tokens, QUESTION, steps) is not None
    of.intake.limit = len(before.tokens) + 3
    assert of.grown(before.tokens, QUESTION, steps) is None


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "mean-sigmoid", "none"])
def test_batched_last_scores_equal_single_scores(activation: str) -> None:
    of = reading({"activation": activation}, tiny.chatml())
    rng = np.random.default_rng(3)
    for count in (1, 2, 3, 7, 64):
        values = (8 * rng.normal(size=(count, 2))).astype(np.float32)
        work = Work([1], (0,), None, 1, False)
        assert of.last_scores(values) == [of.finish(work, row[None]).values[-1] for row in values]
    values[3, 1] = np.nan
    assert [score is None for score in of.last_scores(values)] == [i == 3 for i in range(64)]
