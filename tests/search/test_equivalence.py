"""Answers that are the same in other words count as one in the vote."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plaudit.config.search import load_search
from plaudit.errors import ConfigError
from plaudit.search.questions.answers import Answer, decided, tally, winner
from plaudit.search.questions.equivalence import SameMathematics, SameNumber
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.search import Search


@pytest.fixture(scope="module")
def mathematics() -> Iterator[SameMathematics]:
    alike = SameMathematics(seconds=20.0)
    yield alike
    alike.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"\dfrac{3}{6}", r"\frac{1}{2}"), (r"50\%", "0.5"),
        (r"2\sqrt{2}", r"\sqrt{8}"), ("x = 3", "3"), (r"\{1, 2\}", r"\{2, 1\}"), ("10^3", "1,000"),
        ("x^2-1", "(x-1)(x+1)"), (r"\text{red}", "red"), (r"90^\circ", "90"),
    ],
)  # fmt: skip
def test_the_same_as_mathematics(mathematics: SameMathematics, one: str, other: str) -> None:
    assert mathematics(one, other)
    assert mathematics(other, one)
    if one != r"\text{red}":
        assert not mathematics(one, "17/4")


def test_another_number_is_another_answer(mathematics: SameMathematics) -> None:
    assert not mathematics("0.333", "1/3")
    assert not mathematics(r"\pi", "3.14159")
    assert not mathematics(r"\frac{1}{2}", "2")


def test_a_vote_by_kinds(mathematics: SameMathematics) -> None:
    """0.4 + 0.3 for a half beat 0.6 for two, which by words would have won."""
    answers = [Answer("2", 0.6, 1), Answer(r"\frac{1}{2}", 0.3, 2), Answer("0.5", 0.4, 3)]
    assert winner(answers, "weighted", SameNumber()) == answers[0]
    assert tally(answers, "weighted", mathematics) == {r"\frac{1}{2}": pytest.approx(0.7), "2": 0.6}
    assert winner(answers, "weighted", mathematics) == answers[2]
    assert winner(answers, "best", mathematics) == answers[0]
    assert tally(answers, "majority", mathematics) == {r"\frac{1}{2}": 2, "2": 1}
    # Three halves in other words are a lead of three, which two paths cannot overturn.
    halves = [Answer(text, 1.0, i) for i, text in enumerate(["1/2", r"\frac{1}{2}", r"\frac{2}{4}"])]
    assert decided(halves, "majority", 2, mathematics)
    assert not decided(halves, "majority", 2, SameNumber())


def test_what_no_program_finishes_is_counted_and_differs() -> None:
    alike = SameMathematics(seconds=4.0)
    assert not alike("9^{9^{9^{9^{9}}}}-1", "7")
    assert not alike("9^{9^{9^{9^{9}}}}-1", "7")
    assert alike.undecided == 1, "it is not asked again"
    assert alike("1/2", r"\frac{1}{2}")
    alike.close()


def test_boxes_with_braces_in_them() -> None:
    recipe = load_search(None, {"steps.stop": "\n"})
    reading = AnswerReading(type(recipe.steps)())
    assert reading.answer(r"so \boxed{7} or \boxed{\frac{1}{\sqrt{2}}}.") == r"\frac{1}{\sqrt{2}}"
    assert reading.answer(r"\boxed{7") is None


def test_a_search_with_it_is_the_same_where_answers_are_numbers() -> None:
    found = []
    for kind in ("number", "math"):
        flags = {"search.method": "best-of-n", "search.width": 4, "data.limit": 2, "steps.equivalence": kind}
        search = Search(load_search(None, flags))
        outcomes = sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)
        search.close()
        found.append([(o.answer and o.answer.text, o.right) for o in outcomes])
    assert found[0] == found[1]


def test_without_math_verify_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError(\"No module named 'math_verify'\")\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'math_verify'; pip install 'plaudit\[verify\]'"):
        SameMathematics()
