"""Exact values of numeric answers: sums of q·√n·π^k with fractions q, from plain notation and simple LaTeX.

Only these forms are evaluated, and only small numbers: anything else, or anything slow to evaluate, is not a number
here.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

ExactNumber = frozenset[tuple[int, int, Fraction]]
"""The terms: n without a square factor, k, q."""
Terms = dict[tuple[int, int], Fraction]

MOST_CHARACTERS = 500
MOST_TERMS = 16
LARGEST_EXPONENT = 64  # of a sum: 8
LARGEST_ROOT = 10**8
MOST_BITS = 4096
_NUMERAL = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2}(?!\d))?")
_MIXED = re.compile(r"(-?)(\d+)(?: ?\\frac ?\{(\d+)\} ?\{(\d+)\}| ?\\frac ?(\d)(\d)| (\d+)/(\d+)) ?(%?)")
_TIMES = ("\\cdot", "\\times", "*", "·", "×")
_OVER = ("/", "\\div", "÷")


class NotExact(ValueError):
    pass


def exact_number(text: str) -> ExactNumber | None:
    """None if the text is not such a number."""
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        if mixed := _MIXED.fullmatch(text):
            sign, whole, *parts, percent = (part for part in mixed.groups() if part is not None)
            top, bottom = map(int, parts)
            if not 0 < top < bottom:
                return None
            factor = Fraction(-1 if sign else 1, 100 if percent else 1)
            terms = _rational((Fraction(top, bottom) + int(whole)) * factor)
        else:
            terms = _Reader(text).whole()
    except (NotExact, ZeroDivisionError, RecursionError):
        return None
    return frozenset((root, pi, factor) for (root, pi), factor in terms.items())


class _Reader:
    """sum: product ± product; product: power · power / power, the sign of · may be left out; power: atom ^ integer."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def whole(self) -> Terms:
        terms = self._sum()
        if self._rest():
            raise NotExact
        return terms

    def _sum(self) -> Terms:
        negative = not self._take("+") and self._take("-")
        terms = _times(_rational(-1 if negative else 1), self._product())
        while True:
            if self._take("+"):
                terms = _plus(terms, self._product())
            elif self._take("-"):
                terms = _plus(terms, _times(_rational(-1), self._product()))
            else:
                return terms

    def _product(self) -> Terms:
        terms = self._power()
        while rest := self._rest():
            if self._take(*_TIMES):
                terms = _times(terms, self._power())
            elif self._take(*_OVER):
                terms = _times(terms, _inverse(self._power()))
            elif rest.startswith(("\\sqrt", "√", "sqrt", "\\pi", "π", "pi", "(")):  # 2√3, and never 1 1/2
                terms = _times(terms, self._power())
            else:
                break
        return terms

    def _power(self) -> Terms:
        terms = self._atom()
        if self._take("^"):
            braced = self._take("{")
            negative = self._take("-")
            exponent = int(self._match(re.compile(r"\d{1,3}")))
            if braced:
                self._need("}")
            terms = _raised(terms, exponent)
            terms = _inverse(terms) if negative else terms
        return _times(terms, _rational(Fraction(1, 100))) if self._take("%") else terms

    def _atom(self) -> Terms:
        if self._take("\\frac"):
            return _times(self._argument(), _inverse(self._argument()))
        if self._take("\\sqrt", "√", "sqrt"):
            return _root(self._argument())
        if self._take("\\pi", "π", "pi"):
            return {(1, 1): Fraction(1)}
        for opening, closing in (("(", ")"), ("{", "}")):
            if self._take(opening):
                terms = self._sum()
                self._need(closing)
                return terms
        return _rational(Fraction(self._match(_NUMERAL)))

    def _argument(self) -> Terms:
        """Of a command: a group, or one digit (\\frac12)."""
        rest = self._rest()
        if rest[:1].isdecimal() and not self.text[: self.at].endswith("√"):
            self.at += 1
            return _rational(int(rest[0]))
        return self._atom()

    def _rest(self) -> str:
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        return self.text[self.at :]

    def _take(self, *signs: str) -> bool:
        rest = self._rest()
        for sign in signs:
            if rest.startswith(sign):
                self.at += len(sign)
                return True
        return False

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise NotExact

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._rest()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise NotExact
        self.at = found.end()
        return found[0]


def _rational(value: Fraction | int) -> Terms:
    return {(1, 0): Fraction(value)} if value else {}


def _plus(a: Terms, b: Terms) -> Terms:
    keys = dict.fromkeys((*a, *b))
    return _checked({key: total for key in keys if (total := a.get(key, Fraction(0)) + b.get(key, Fraction(0)))})


def _times(a: Terms, b: Terms) -> Terms:
    product: Terms = {}
    for (m, j), p in a.items():
        for (n, k), q in b.items():
            common = math.gcd(m, n)
            key = (m * n // common**2, j + k)
            product[key] = product.get(key, Fraction(0)) + p * q * common
    return _checked({key: factor for key, factor in product.items() if factor})


def _inverse(terms: Terms) -> Terms:
    if len(terms) > 1:
        raise NotExact
    if not terms:
        raise ZeroDivisionError
    (((root, pi), factor),) = terms.items()
    return {(root, -pi): 1 / (factor * root)}


def _raised(terms: Terms, exponent: int) -> Terms:
    if exponent > (LARGEST_EXPONENT if len(terms) <= 1 else 8):
        raise NotExact
    power = _rational(1)
    for _ in range(exponent):
        power = _times(power, terms)
    return power


def _root(terms: Terms) -> Terms:
    """The square root of a non-negative fraction."""
    value = terms.get((1, 0), Fraction(0))
    if value < 0 or terms.keys() - {(1, 0)}:
        raise NotExact
    radicand = value.numerator * value.denominator
    outside = math.isqrt(radicand)
    if outside**2 == radicand:
        return _rational(Fraction(outside, value.denominator))
    if radicand > LARGEST_ROOT:
        raise NotExact
    outside = max(factor for factor in range(1, outside + 1) if radicand % factor**2 == 0)
    return {(radicand // outside**2, 0): Fraction(outside, value.denominator)}


def _checked(terms: Terms) -> Terms:
    bits = (max(q.numerator.bit_length(), q.denominator.bit_length()) for q in terms.values())
    if len(terms) > MOST_TERMS or max(bits, default=0) > MOST_BITS or any(root > LARGEST_ROOT for root, _ in terms):
        raise NotExact
    return terms
