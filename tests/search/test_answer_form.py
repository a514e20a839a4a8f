"""Canonical forms of answers, independent of notation."""

import pytest

from plaudit.search.questions.answer_form import answer_form
from plaudit.search.questions.exact_number import exact_number

EQUAL = [
    ("7", "7.0"), ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"\dfrac{3}{6}", r"\tfrac12"),
    ("50%", "0.5"), (r"50\%", "1/2"), ("28 percent", r"28\%"), ("1,000", "1000"), ("12,345.60", "12345.6"),
    ("1{,}000", "1000"), (r"10,\!000", "10000"), (r"11,\! 111,\! 111,\! 100", "11111111100"), ("1 000", "1000"),
    ("(1,2)", "( 1 , 2 )"), (r"\left(1, \frac12\right)", "(1,0.5)"), ("(1,234)", "(1, 234)"),
    ("(1,000, 2,000)", "(1000,2000)"), (r"\{1,2\}", r"\{2, 1\}"), ("{1,2}", r"\{2,1\}"), ("{1,1,2}", "{1,2}"),
    ("[0,1)", "[0, 1)"), (r"(-\infty, 2]", "(-∞,2]"), (r"[0,1)\cup(2,3]", r"(2, 3] \cup [0, 1)"),
    (r"2\sqrt{2}", r"\sqrt{8}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"), (r"1+\sqrt{2}", r"\sqrt 2 + 1"),
    (r"\frac94\pi", r"\frac{9\pi}{4}"), ("3π", r"3\pi"), (r"\boxed{\frac{1}{3}}", "1/3"), (r"$\boxed{7}$.", "7"),
    (r"\text{red}", "red"), (r"\text{(C)}", "C"), ("5 cm", r"5\text{ cm}"), ("5 cm", "5"), ("5 centimeters", "5cm"),
    (r"15\mbox{ cm}^2", "15 square centimeters"), (r"90^\circ", "90"), ("90°", "90 degrees"), (r"\$5", "5 dollars"),
    ("$1,000.99", "1000.99"), ("60 km/h", "60 kilometers per hour"), (r"1\frac{1}{2}", "3/2"), ("1 1/2", "1.5"),
    ("-1 1/2", "-3/2"), ("10^3", "1,000"), (r"3\times10^{8}", "300000000"), ("1.5e3", "1500"), (".4", "0.4"),
    ("5.", "5"), ("x + 1", "x+1"), ("-0", "0"), ("−5", "-5"), (r"\sqrt{\frac14}", "1/2"), ("sqrt(8)", r"2\sqrt2"),
    ("√8", r"2\sqrt2"), (r"\(9\)", "9"), ("1, 2", "1,2"), ("1,000, 2,000", "1000, 2000"),
    ("(1,2),(3,4)", "(1, 2), (3, 4)"), ("x=5", "5"), ("x = 5", "x=5.0"), (r"x \in [1,2]", "[1, 2]"),
    ("$y = 2x+1$", "2x + 1"), (r"n = 5\text{ cm}", "5 cm"), (r"3\frac12\%", "0.035"), ("12 1/2 percent", "0.125"),
]  # fmt: skip
DIFFERENT = [
    ("1,2", "12"), ("1, 2", "12"), ("32, 349", "32349"), ("1,234", "1, 234"), ("1,2", "1.2"), ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"), ("[0,1)", "(0,1)"), ("(1,2)", r"\{1,2\}"), ("1,2", "(1,2)"), ("1,2", "2,1"),
    ("(1,23)", "(12,3)"), ("(1,234)", "1234"), ("50%", "50"), ("0.333", "1/3"), (r"\pi", "3.14159"), (r"\pi", "3.14"),
    ("5 cm", "5 m"), ("5 cm", "50 mm"), ("5 cm^2", "5 cm"), ("5 apples", "5"), ("5 apples", "5 pears"), ("1/0", "1"),
    ("1/0", "0"), (r"\frac12", "2"), (r"2\sqrt{2}", "4"), ("red", "Red"), ("x+1", "x-1"), ("(-∞,2)", "(∞,2)"),
    (r"\frac{1}{2}", "1,2"), ("1 2", "12"), ("2 1/2", "1"), (r"\{1,2\}", "12"), ("5%", "5 percent off"),
    ("12", "1 2"), ("0,5", "5"), ("0,111", "111"), ("1,0000", "10000"), ("12,34", "1234"), ("1234,567", "1234567"),
    ("", "0"), ("9^9^9", "9"), (r"\sqrt{-4}", "2"), ("-2^2", "(-2)^2"), ("60 km/h", "60 km"), ("1,000", "1,0"),
    ("x=3", "x=4"), ("x=3", "y=3"), ("x=y=3", "3"), ("x<3", "3"), ("2x=6", "6"), (r"\int", "t"),
    (r"\infty", r"-\infty"), ("1-2", "12"), ("3:2", "32"), ("A", "(B)"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_answers_in_two_notations(one: str, other: str) -> None:
    assert answer_form(one).says(answer_form(other))
    assert answer_form(other).says(answer_form(one))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers(one: str, other: str) -> None:
    assert not answer_form(one).says(answer_form(other))
    assert not answer_form(other).says(answer_form(one))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}", "9^999", "9^64" * 50, "(" * 300 + "1" + ")" * 300, "(1+√2+√3+√5+√7+√11)^8", "((1+√2)^8)^8" * 40,
        r"\sqrt{123456789123456789}", "1e99*" * 90 + "1", r"\frac" * 90, "1" * 5000, "," * 499, "{" * 600,
    ],
)  # fmt: skip
def test_expensive_expressions_are_compared_as_text(text: str) -> None:
    assert answer_form(text).says(answer_form(text))
    assert not answer_form(text).says(answer_form("1"))


def test_numbers_are_exact() -> None:
    third, million = exact_number("1/3"), exact_number("1.000001")
    assert third is not None
    assert million is not None
    assert exact_number("0." + "3" * 400) not in (None, third)
    assert exact_number(r"(1+\sqrt{2})(1-\sqrt{2})") == exact_number("-1")
    assert exact_number(r"\frac{\sqrt{6}}{\sqrt{2}}") == exact_number(r"\sqrt3")
    assert exact_number(r"\frac{\pi^2}{\pi}") == exact_number(r"\pi")
    assert exact_number(r"\frac{1}{1+\sqrt{2}}") is None
    assert exact_number("2x") is None
