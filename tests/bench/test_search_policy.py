"""The checks of the tasks in benchmarks/search_policy_gpu.py agree with checks by hand; best-of-n is the mean over its
pool."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from search_grounds import GROUNDS, split
from search_policy_tables import best_of, pool_auc


def test_chain_steps_are_correct_until_the_first_mistake() -> None:
    chain = GROUNDS["chain"]
    prompt = "73a+84b-90="  # 37 + 48 - 9
    assert chain.labels(prompt, ["a73+84=58;", "b58-90=67;", "#67"]) == [True, True, True]
    assert chain.labels(prompt, ["a73+84=47;", "b47-90=56;", "#56"]) == [False, False, False]
    assert chain.labels(prompt, ["a73+84=58;", "b58-90=57;", "#57"]) == [True, False, False]
    assert chain.right(prompt, "a73+84=58;b58-90=67;#67")
    assert not chain.right(prompt, "#58")


def test_countdown_steps_are_correct_while_the_target_is_reachable() -> None:
    countdown = GROUNDS["countdown"]
    prompt = "a12b7c33?45="
    assert countdown.labels(prompt, ["a+12=12;", "b=12;", "c+33=45;", "#45"]) == [True] * 4
    assert countdown.labels(prompt, ["a+12=12;", "b+7=19;", "c=19;", "#19"]) == [True, False, False, False]
    assert countdown.labels(prompt, ["a=0;", "b=0;"]) == [False, False]


@pytest.mark.parametrize("name", list(GROUNDS))
def test_a_demonstration_without_mistakes_is_correct(name: str) -> None:
    ground, rng = GROUNDS[name], random.Random(1)
    drawn = [ground.draw(rng, level) for level in ground.levels for _ in range(50)]
    sound = [(prompt, text) for prompt, text in drawn if all(ground.labels(prompt, split(text)))]
    assert sound
    assert all(ground.right(prompt, text) for prompt, text in sound)


def test_best_of_n_is_the_mean_over_draws_from_the_pool() -> None:
    row = {
        "question": 1, "answers": ["7", "7", "9", "9", "9", ""], "right": [True, True, False, False, False, False],
        "weights": {"steps": [0.9, 0.8, 0.1, 0.2, 0.3, 1.0]},
    }  # fmt: skip
    assert best_of(row, 6, None) == 0.0  # three votes to two
    assert best_of(row, 6, "steps") == 1.0  # 1.7 to 0.6, and a response without an answer has no vote
    assert 0.0 < best_of(row, 1, None) < 1.0
    assert pool_auc([row], "steps") == pytest.approx(6 / 8)
