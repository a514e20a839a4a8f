import math

import numpy as np
import pytest

from plaudit.train.supervised.evaluate import auc, first_wrong_f1


def test_auc_by_hand() -> None:
    scores = np.array([0.9, 0.8, 0.4, 0.3])
    assert auc(scores, np.array([True, True, False, False])) == 1.0
    assert auc(scores, np.array([False, False, True, True])) == 0.0
    assert auc(scores, np.array([True, False, True, False])) == 0.75  # of 4 pairs, (0.4 against 0.8) is wrong
    assert auc(np.array([0.5, 0.5, 0.5]), np.array([True, False, True])) == 0.5
    assert math.isnan(auc(scores, np.array([True] * 4)))


def test_auc_equals_counting_all_pairs() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, 20, 200) / 20, rng.random(200) < 0.3
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[truth] for b in scores[~truth]]
    assert auc(scores, truth) == pytest.approx(np.mean(pairs))


def test_first_wrong_f1_by_hand() -> None:
    truth = [np.array(t) for t in ([True, True], [True, False, False], [False, False], [True, True])]
    scores = [np.array(f) for f in ([0.9, 0.8], [0.9, 0.2, 0.7], [0.7, 0.1], [0.9, 0.4])]
    # correct solutions: one of two is accepted; flawed ones: the first error is detected in one of two
    assert first_wrong_f1(scores, truth) == pytest.approx(0.5)
    assert math.isnan(first_wrong_f1(scores[:1], truth[:1]))
    assert first_wrong_f1([np.array([0.1]), np.array([0.9])], [np.array([True]), np.array([False])]) == 0.0
