"""Equivalent answers in different notation count as one in the vote."""

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
def test_mathematically_equal_answers_are_equivalent(mathematics: SameMathematics, one: str, other: str) -> None:
    assert mathematics(one, other)
    assert mathematics(other, one)
    if one != r"\text{red}":
        assert not mathematics(one, "17/4")


# From math-verify's own tests (tests/test_all.py, MIT): truth, answer, and whether it considers them equal.
MATH_VERIFY = [
    ("7425000", "7,425,000", True), ("1000", "1 000", True), ("1000.0", "1,000.0", True), ("0.4", ".4", True),
    ("[0,1)", "[0,1)", True), ("[0,9)", "[0,1)", False), ("(0,9)", "[0,9)", False), ("1", "-[0,1)", False),
    ("1/3", r"\frac13", True), ("1", r"\frac3{3}", True), (r"\sqrt{3}", r"\sqrt3", True),
    ("1/3", r"\cfrac{1}{3}", True),
    ("1/3", r"\left( \frac{1}{3} \right)", True), ("1/3", r"\boxed{\frac{1}{3}}", True),
    ("1/3", r"\frac{1}{3} \text{meters}", True), ("1/3", r"k = \frac{1}{3}", True), (r"28\%", "28 %", True),
    (r"28\%", "28 pct", True), (r"28\%", "28 percent", True), (r"15\mbox{ cm}^2", r"15\text{ cm}^2", True),
    ("(6,31,-1)", "(6, 31, -1)", True), (r"\sqrt{2}+\sqrt{5}", r"\sqrt 2+\sqrt 5", True),
    (r"\frac{9}{4}\pi", r"\frac94\pi", True), (r"[-1, -\frac{1}{2}) \cup (0, 1)", r"[-1, -\tfrac12) \cup (0, 1)", True),
    (r"x \leq 5", r"5 \geq x", True), ("7 = 11a+c", "11a+c", False), ("11", "x=11", True), ("x < 1", "-x > -1", True),
    ("x < 1", "x > -1", False), ("a +3z = 0", "0", False), ("2x + z = 1", "1", False), ("k=1", "1", True),
    (r"(1,\frac{9}{2})", "(1,4.5)", True), (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}", True),
    (r"\tan^2(y)+1", r"\sec^2(y)", True), ("34x+45y-20z+100=0", "-34x-45y+20z-100=0", True),
    ("(a+5)(b+2)", "(+5)(b+2)", False), ("2", r"\frac{1+\sqrt{5}}{2}", False), (r"1\sqrt{19}", "1", False),
    ("x+2n+1", "x+1", False), ("16386.20", r"\$16,\!386.20", True), ("14916", "14{,}916", True),
    ("(3,1)", "{1,3}", False),
    (r"\text{C}", r"\boxed{\text{(C)}}.", True), ("11111111100", r"11,\! 111,\! 111,\! 100", True),
    ("32349", "32, 349", False), (r"(2, 12) \cup (12, 102)", r"(2,12) \cup (12,102)", True), ("4", r"4\sqrt{2}", False),
]  # fmt: skip


def test_math_verifys_own_cases(mathematics: SameMathematics) -> None:
    """The results are those of math-verify, and SameNumber considers two answers equal only where math-verify does."""
    alike = SameNumber()
    for truth, answer, same in MATH_VERIFY:
        assert mathematics(answer, truth) == same, (truth, answer)
        assert same or not alike(answer, truth), (truth, answer)
    assert sum(alike(answer, truth) for truth, answer, _ in MATH_VERIFY) >= 25, "most need no math-verify"


def test_decimal_or_list_comma_is_not_ignored(mathematics: SameMathematics) -> None:
    for alike in (SameNumber(), mathematics):
        assert not alike("1,2", "12")
        assert not alike("12", "1,2")
        assert not alike("(1,23)", "(12,3)")
        assert alike("1,234", "1234")


def test_different_numbers_are_different_answers(mathematics: SameMathematics) -> None:
    assert not mathematics("0.333", "1/3")
    assert not mathematics(r"\pi", "3.14159")
    assert not mathematics(r"\frac{1}{2}", "2")


def test_votes_of_equivalent_answers_are_summed(mathematics: SameMathematics) -> None:
    """0.4 + 0.3 for x + 1 beat 0.6 for 2, which would have won if the texts were compared."""
    answers = [Answer("2", 0.6, 1), Answer("x+1", 0.3, 2), Answer("1+x", 0.4, 3)]
    assert winner(answers, "weighted", SameNumber()) == answers[0]
    assert tally(answers, "weighted", mathematics) == {"x+1": pytest.approx(0.7), "2": 0.6}
    assert winner(answers, "weighted", mathematics) == answers[2]
    assert winner(answers, "best", mathematics) == answers[0]
    assert tally(answers, "majority", mathematics) == {"x+1": 2, "2": 1}
    # Three notations of 1/2 are a lead of three, which two more paths cannot overturn.
    halves = [Answer(text, 1.0, i) for i, text in enumerate(["1/2", r"\frac{1}{2}", r"\frac{2}{4}"])]
    assert decided(halves, "majority", 2, mathematics)
    assert decided(halves, "majority", 2, SameNumber())
    wholes = [Answer(text, 1.0, i) for i, text in enumerate(["x+1", "1+x", r"\frac{2x+2}{2}"])]
    assert decided(wholes, "majority", 2, mathematics)
    assert not decided(wholes, "majority", 2, SameNumber())


@pytest.mark.slow
def test_undecidable_comparison_is_counted_and_means_different() -> None:
    alike = SameMathematics(seconds=4.0)
    assert not alike("9^{9^{9^{9^{9}}}}-1", "7")
    assert not alike("9^{9^{9^{9^{9}}}}-1", "7")
    assert alike.undecided == 1, "it is not asked again"
    assert alike("1/2", r"\frac{1}{2}")
    alike.close()


def test_nested_braces_in_a_box_are_parsed() -> None:
    recipe = load_search(None, {"steps.stop": "\n"})
    reading = AnswerReading(type(recipe.steps)())
    assert reading.answer(r"so \boxed{7} or \boxed{\frac{1}{\sqrt{2}}}.") == r"\frac{1}{\sqrt{2}}"
    assert reading.answer(r"\boxed{7") is None


@pytest.mark.slow
def test_math_equivalence_gives_the_same_search_for_numeric_answers() -> None:
    results = []
    for kind in ("number", "math"):
        flags = {"search.method": "best-of-n", "search.width": 4, "data.limit": 2, "steps.equivalence": kind}
        search = Search(load_search(None, flags))
        outcomes = sorted(search.run(search.questions()), key=lambda outcome: outcome.question.index)
        search.close()
        results.append([(o.answer and o.answer.text, o.right) for o in outcomes])
    assert results[0] == results[1]


def test_missing_math_verify_is_an_error_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError(\"No module named 'math_verify'\")\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'math_verify'; pip install 'plaudit\[verify\]'"):
        SameMathematics()
