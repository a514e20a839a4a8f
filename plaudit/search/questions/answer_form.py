"""The meaning of an answer, independent of its notation: numbers by value, with their unit; tuples, intervals and
lists in order, sets and unions without order; anything else as text. "x = 5" means 5, named x.

Strict: nothing is dropped, rounded or converted. A comma is a separator; it groups digits only where it can mean
nothing else ("1,000", "12,345.6"; in brackets only beside others with a space: "(1,000, 2,000)"), or in LaTeX's
notation ("1{,}000").
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from plaudit.search.questions.exact_number import MOST_CHARACTERS, ExactNumber, exact_number

REMEMBERED = 1 << 16
_UNITS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram",
    "kg": "kilogram", "oz": "ounce", "lb": "pound lbs", "ml": "mL milliliter millilitre", "l": "L liter litre",
    "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "",
    "degree": "°", "radian": "rad", "$": "dollar", "cent": "¢", "€": "euro", "£": "", "unit": "", "mph": "",
}  # fmt: skip
_UNIT = {alias: unit for unit, aliases in _UNITS.items() for alias in (unit, *aliases.split())}
_PERCENT = re.compile(r"(.*\d)\s*(?:percent|pct)", re.DOTALL)
_QUANTITY = re.compile(r"(.*?(?:[\d.)}]|\\pi|π))\s*([A-Za-z°¢$€£].*)", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z])\s*(?:=|\\in(?![A-Za-z])|∈)\s*([^=<>]+)", re.DOTALL)
_POWER = re.compile(r"(.+?)\^\{?([23])\}?")
_INFINITY = re.compile(r"([+-]?) ?(?:\\infty|∞|infinity)")
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?: \d{3})+(?![\d ])")
_OPERATOR = re.compile(r"\s*([-+*/=^(){}\[\],<>:;|])\s*")
_WRITING: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\{,\}|,\\!) ?(?=\d{3})", ""),  # digit groups in LaTeX
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", ""),
        (r"\\(?:[,;: ]|quad(?![A-Za-z]))|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text|textbf|textrm|textit|textnormal|mathrm|mathbf|mbox) ?\{([^{}]*)\}", r" \1 "),
        (r"\\([%$])", r"\1"),
        (r" ?\^ ?(?:\\circ|\{ ?\\circ ?\})", " degree"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"²", "^2"),
        (r"³", "^3"),
        (r"[−–]", "-"),
        (r"\s+", " "),
    )
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """unit   of a number; "" without one
    name   of the variable: x in "x = 5"; "" without one"""

    value: Hashable
    unit: str = ""
    name: str = ""

    def says(self, other: AnswerForm) -> bool:
        """Whether both mean the same; a number without a unit matches any unit, a value without a name any name."""
        pairs = ((self.unit, other.unit), (self.name, other.name))
        return self.value == other.value and all(one == two or not one or not two for one, two in pairs)


@lru_cache(REMEMBERED)
def answer_form(text: str) -> AnswerForm:
    if len(text) <= MOST_CHARACTERS:
        with suppress(RecursionError):  # hundreds of nested brackets
            plain = _written_plainly(text)
            named = _NAMED.fullmatch(plain)
            return replace(_form(named[2].strip()), name=named[1]) if named else _form(plain)
    return AnswerForm(" ".join(text.split()))


def _written_plainly(text: str) -> str:
    text = text.strip()
    before = None
    while before != text:
        before = text
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inside = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
                text = text if inside.endswith("\\") else inside.strip()
        for command in ("\\boxed{", "\\fbox{"):
            if text.startswith(command) and _closes_at_end(text, len(command) - 1):
                text = text[len(command) : -1].strip()
        text = text.removesuffix(".").rstrip() if len(text) > 1 else text
    for pattern, replacement in _WRITING:
        text = pattern.sub(replacement, text)
    return text.strip()


def _form(text: str) -> AnswerForm:
    union = _split(text, ("\\cup", "∪"))
    if len(union) > 1:
        return AnswerForm(("union", frozenset(map(_form, union))))
    opening = next((sign for sign in ("\\{", "{", "(", "[") if text.startswith(sign)), "")
    closing = next((sign for sign in ("\\}", "}", ")", "]") if text.endswith(sign)), "")
    if opening and closing and _closes_at_end(text, len(opening) - 1):
        return _bracketed(opening, text[len(opening) : -len(closing)].strip(), closing)
    text = _ungrouped(text)
    parts = _split(text, (",",))
    if len(parts) > 1 and all(parts):
        return AnswerForm(("list", tuple(map(_form, parts))))
    return _scalar(text)


def _bracketed(opening: str, inside: str, closing: str) -> AnswerForm:
    if re.search(r",\s", inside):
        inside = _ungrouped(inside)
    parts = _split(inside, (",",))
    if len(parts) == 1 and (opening, closing) in (("(", ")"), ("{", "}")):  # brackets used only for grouping
        return _form(parts[0])
    elements = tuple(map(_form, parts)) if inside else ()
    if opening.endswith("{") and closing.endswith("}"):
        return AnswerForm(("set", frozenset(elements)))
    return AnswerForm((opening, elements, closing))


def _scalar(text: str) -> AnswerForm:
    if infinity := _INFINITY.fullmatch(text):
        return AnswerForm(("infinity", infinity[1] or "+"))
    text = _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
    if percent := _PERCENT.fullmatch(text):
        text = f"{percent[1]}%"
    number, unit = exact_number(text), ""
    if number is None:
        number, unit = _quantity(text)
    return AnswerForm(_OPERATOR.sub(r"\1", text)) if number is None else AnswerForm(("number", number), unit)


def _quantity(text: str) -> tuple[ExactNumber | None, str]:
    """A number with a known unit."""
    if text.startswith(("$", "€", "£")):
        return exact_number(text[1:].strip()), text[0]
    found = _QUANTITY.fullmatch(text)
    unit = _unit(found[2]) if found else None
    return (exact_number(found[1]), unit) if found and unit else (None, "")


def _unit(text: str) -> str | None:
    """The canonical form of a unit: cm^2 for square centimetres, km/h for kilometres per hour."""
    text = text.strip()
    parts = [part.strip() for part in re.split(r"/|\bper\b", text)]
    if len(parts) == 2:
        above, below = map(_unit, parts)
        return f"{above}/{below}" if above and below else None
    for word, power in (("square ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if text.startswith(word):
            base = _unit(text[len(word) :])
            return base and f"{base}^{power}"
    if power_found := _POWER.fullmatch(text):
        base = _unit(power_found[1])
        return base and f"{base}^{power_found[2]}"
    return _UNIT.get(text) or _UNIT.get(text.lower().removesuffix("s") if len(text) > 2 else "")


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Splits at separators outside of brackets."""
    parts, depth, begin, at = [], 0, 0, 0
    while at < len(text):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        sign = next((each for each in separators if depth == 0 and text.startswith(each, at)), None)
        if sign is None:
            at += 1
            continue
        parts.append(text[begin:at].strip())
        begin = at = at + len(sign)
    return [*parts, text[begin:].strip()]


def _closes_at_end(text: str, at: int) -> bool:
    """Whether the bracket at `at` closes with the last character. An interval's two brackets may be of two kinds."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _ungrouped(text: str) -> str:
    """Removes the commas between groups of three digits outside of brackets."""

    def joined(found: re.Match[str]) -> str:
        before = text[: found.start()]
        depth = sum(map(before.count, "([{")) - sum(map(before.count, ")]}"))
        return found[0] if depth else found[0].replace(",", "")

    return _THOUSANDS.sub(joined, text)
