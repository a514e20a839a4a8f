"""Transformations of rewards before they become advantages."""

import json
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.algo.rewards import RunningNorm, at_last_token, length_penalty


def test_reward_is_placed_on_the_last_policy_token() -> None:
    # samples: ends in a tool token; ends in a policy token; has no policy token; is empty; one policy token
    lengths = (4, 2, 2, 0, 1)
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    placed = at_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask, lengths)
    assert placed.tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 5]
    assert at_last_token(torch.tensor([3.0]), torch.zeros(2, dtype=torch.bool), (2,)).tolist() == [0, 0]


def test_length_penalty() -> None:
    assert length_penalty((0, 10, 4), 0.25).tolist() == [0, -2.5, -1]


def test_running_mean_and_std_by_hand() -> None:
    norm = RunningNorm()
    norm.update(torch.tensor([1.0, 3.0]))
    norm.update(torch.tensor([8.0]))
    norm.update(torch.tensor([]))
    assert (norm.count, norm.mean, norm.std) == (3, pytest.approx(4), pytest.approx(math.sqrt(13)))
    scaled = norm.normalise(torch.tensor([4.0, 4 + 2 * math.sqrt(13)]))
    assert scaled.tolist() == pytest.approx([0, 2], abs=1e-6)


def test_normalising_does_not_update_the_statistics() -> None:
    norm = RunningNorm()
    norm.update(torch.tensor([1.0, 2.0, 4.0]))
    before = norm.state()
    norm.normalise(torch.tensor([1e9, -1e9]))
    assert norm.state() == before


def test_normalising_with_no_data_or_zero_variance() -> None:
    norm = RunningNorm()
    assert norm.normalise(torch.tensor([3.0])).tolist() == pytest.approx([3.0])
    norm.update(torch.tensor([0.5]))
    assert norm.normalise(torch.tensor([0.5, 1.5])).tolist() == pytest.approx([0, 1])
    norm.update(torch.tensor([0.5, 0.5]))
    assert norm.normalise(torch.tensor([0.5, 1.5])).tolist() == pytest.approx([0, 1])


BATCHES = st.lists(st.lists(st.integers(-80_000, 80_000).map(lambda n: n / 8), max_size=6), max_size=6)


@given(BATCHES)
def test_running_statistics_do_not_depend_on_batch_sizes(batches: list[list[float]]) -> None:
    norm = RunningNorm()
    for batch in batches:
        norm.update(torch.tensor(batch))
    values = [x for batch in batches for x in batch]
    assert norm.count == len(values)
    if len(set(values)) > 1:
        assert norm.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
        assert norm.std == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-6)


def test_running_std_is_accurate_with_a_large_offset() -> None:
    norm = RunningNorm()
    for start in range(0, 1000, 10):
        norm.update(torch.tensor([1e6 + (i % 2) for i in range(start, start + 10)]))
    assert norm.std == pytest.approx(math.sqrt(0.25 * 1000 / 999), rel=1e-9)


def test_state_round_trips_through_json() -> None:
    norm, restored = RunningNorm(), RunningNorm()
    norm.update(torch.tensor([0.1, 0.7, 0.3]))
    restored.load(json.loads(json.dumps(norm.state())))
    norm.update(torch.tensor([0.9]))
    restored.update(torch.tensor([0.9]))
    assert restored.state() == norm.state()
