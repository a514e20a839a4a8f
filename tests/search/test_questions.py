"""Questions of a gym: the split that RL holds out, checked by the gym task itself."""

from typing import Any

import pytest

from plaudit.config.rl import RlDataTable
from plaudit.config.search import QuestionsTable, parse_search
from plaudit.errors import ConfigError
from plaudit.search.questions.answers import Alike
from plaudit.search.questions.equivalence import SameNumber
from plaudit.search.questions.questions import GymChecker, Question, open_questions
from plaudit.train.rollouts.sources import open_prompts
from plaudit.worlds.tokenizer import sums_tokenizer

SUMS: dict[str, Any] = {"gym": "chain_sum", "gym_options": {"max_digits": 1, "max_terms": 3}}
ALIKE: Alike = SameNumber()


def search_recipe(**data: Any) -> Any:
    return parse_search({"model": {"path": "sums-policy"}, "prm": {"path": "sums-steps"}, "data": data}, "test")


def test_gym_is_exclusive_and_needs_a_limit() -> None:
    assert search_recipe(**SUMS, limit=3).data.gym == "chain_sum"
    with pytest.raises(ConfigError, match=r"a gym is unlimited: set the number of questions with data\.limit"):
        search_recipe(**SUMS)
    with pytest.raises(ConfigError, match=r"give one of data\.world .*; got \['world', 'gym'\]"):
        search_recipe(world="sums", **SUMS, limit=3)
    with pytest.raises(ConfigError, match="shots are turns of a chat"):
        search_recipe(**SUMS, limit=3, shots=[["1 + 1 =", "2"]])


def test_answer_is_checked_by_the_questions_check_or_its_truth() -> None:
    plain = Question(0, "7+8=", "7+8=", (1,), "15")
    assert [plain.right(answer, ALIKE) for answer in ("15.0", "16", None)] == [True, False, False]
    unknown = Question(0, "7+8=", "7+8=", (1,))
    assert unknown.right("15", ALIKE) is None
    checked = Question(0, "?", "?", (1,), "any even number", lambda answer: int(answer) % 2 == 0)
    assert [checked.right(answer, ALIKE) for answer in ("4", "5", None)] == [True, False, False]


@pytest.mark.slow
def test_gym_questions_equal_the_heldout_prompts_of_rl() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make slow installs it")
    tokenizer = sums_tokenizer()
    heldout = open_prompts(RlDataTable(**SUMS, eval_items=5), tokenizer, 1).heldout()
    checker = GymChecker()
    try:
        questions = open_questions(QuestionsTable(**SUMS, limit=5), tokenizer, 1, checker)
        assert [(q.text, q.prompt_ids) for q in questions] == [(p.text, p.token_ids) for p in heldout]
        for question in questions:
            truth = int(question.truth or "")
            assert question.right(f"{truth}.00", ALIKE) is True
            assert question.right(str(truth + 1), ALIKE) is False
            assert question.right(None, ALIKE) is False
    finally:
        checker.close()
