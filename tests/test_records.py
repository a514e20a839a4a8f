import dataclasses

import pytest

from plaudit.records import Batch, ItemError, Sample, Score, StepScores


def sample(group: int = 0, index: int = 0, **changes: object) -> Sample:
    fields: dict[str, object] = {
        "prompt_ids": (1, 2), "token_ids": (3, 4), "text": "ab", "logprobs": (-0.1, -0.2), "raw_logprobs": (-0.1, -0.2),
        "versions": (0, 0), "mask": (1, 1), "finish_reason": "stop", "group": group, "index": index,
    }  # fmt: skip
    return Sample(**{**fields, **changes})  # type: ignore[arg-type]


def test_records_are_frozen_and_slotted() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().reward = 1.0  # type: ignore[misc]
    assert not hasattr(sample(), "__dict__")


def test_sample_has_one_entry_per_token_in_every_list() -> None:
    with pytest.raises(ValueError, match="'logprobs': 1"):
        sample(logprobs=(-0.1,))
    with pytest.raises(ValueError, match="'token_rewards': 3"):
        sample(token_rewards=(0.0, 0.0, 1.0))


def test_score_is_either_a_value_or_an_error() -> None:
    error = ItemError("too_long", "9 tokens, the limit is 8")
    assert Score(error=error).value is None
    for bad in ({}, {"value": 0.0, "error": error}):
        with pytest.raises(ValueError, match="either a value or an error"):
            Score(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="either an aggregate or an error"):
        StepScores(values=(0.5,))


def test_batch_groups_keep_their_order() -> None:
    batch = Batch(tuple(sample(group, index) for group in (7, 3) for index in range(2)))
    assert [(group, [s.index for s in members]) for group, members in batch.groups().items()] == [
        (7, [0, 1]),
        (3, [0, 1]),
    ]
